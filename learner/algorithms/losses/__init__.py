"""Losses per token, before aggregation: of the policy (on `policy_logprobs_BT`) and of the critic (on `values_BT`).

ρ = π/π_old, A the advantage, m the loss mask, sg stops the gradient. π_old ("proximal") is the policy at the start of the step;
`algorithm.proximal` chooses its log-probs. Masked entries give 0. Ratios stay in log space until they are bounded, so extreme ones do not
overflow. Where the formula itself is unbounded (A < 0 and a huge ρ without `dual_clip`) the loss is inf.
"""
