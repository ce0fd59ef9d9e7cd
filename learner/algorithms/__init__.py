"""All of the mathematics: pure functions of tensors, chosen by name in config and composed by `objective.Objective`.

A function gets what it asks for by parameter name (`rewards_G` one group at a time, `loss_mask_NT` for the whole batch,
`policy_logprobs_BT` for the rows of a micro-batch); config sets its other parameters. Users' own functions work the same way, by full
path. Docstrings carry formula, source, degenerate case and peers; `docs/algorithms.md` is made of them.
"""
