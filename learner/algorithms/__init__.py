"""All of the mathematics: pure functions of tensors, chosen by name in config and composed by `objective.Objective`.

A function's parameter names say which tensors it gets: `rewards_G` one group at a time, `loss_mask_NT` for the whole batch,
`policy_logprobs_BT` for the rows of a micro-batch. Config sets all other parameters. Users name their own functions by full path.
Docstrings state formula, source, degenerate case and peers; docs/algorithms.md is made from them.
"""
