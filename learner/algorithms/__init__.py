"""All of the mathematics: pure functions of tensors, chosen by name in config and composed by `objective.Objective`.

A function asks for what it needs by parameter name (`rewards_G` is given one group at a time, `loss_mask_NT` the whole batch,
`policy_logprobs_BT` the rows of a micro-batch); config binds the rest. Users' own functions work the same way, by full path.
Docstrings carry formula, source, degenerate case and peers; `docs/algorithms.md` is made of them.
"""
