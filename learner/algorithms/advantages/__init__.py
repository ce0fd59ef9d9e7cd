"""Advantages. The first parameter of a function says how it is called.

`rewards_G`: once per group, returns one number per trajectory. `rewards_N` or `reward_components_NK`: once, for the whole batch.
`token_rewards_NT`: once, returns advantages per token, or those and the returns that a critic learns.

A group whose rewards are all equal gives exactly 0, detected as max == min: dividing the rounding of its mean by a small epsilon gives
advantages of 0.8 in other systems.
"""
