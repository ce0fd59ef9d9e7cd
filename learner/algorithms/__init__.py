"""All of the mathematics: pure functions of tensors, chosen by name in config and composed by `objective.Objective`.

A function gets the tensors that its parameters name: `rewards_G` one group at a time, `loss_mask_NT` for the whole batch,
`policy_logprobs_BT` for the rows of a micro-batch. Config sets its other parameters. Users' own functions work the same way, by full
path. Docstrings state formula, source, degenerate case and peers, and are the text of docs/algorithms.md.
"""
