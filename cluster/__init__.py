"""treadwheel's cluster: the loop, the buffer, weights and workers, written against protocols.

    prompts ── Ticket ──▶ rollout workers ── Arrow batch ──▶ reward service ──▶ reference scorer
                              ▲                                                     │
                     weights (attested)                                          buffer (start order,
                              │                                                     │ staleness bound)
                           learner ◀────────── groups of one optimizer step ────────┘

The controller moves object refs and decisions, never tensors. cluster/ never imports actors/ or learner/; deploy/ connects them.
"""
