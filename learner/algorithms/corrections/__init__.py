"""Off-policy corrections: weights from the gap between the rollout policy μ and the learner, multiplied onto the policy loss.

μ differs from π_old by staleness and by the engine's numerics. Weights carry no gradient; 0 drops a token's loss. Dropped tokens stay in
the aggregation's denominator, and in the ratio of their trajectory (`gspo`, `gmpo`), which still gives them gradient.
"""
