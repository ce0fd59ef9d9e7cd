"""Advantages. The first parameter of a function says how it is called.

`rewards_G`: once per group, returns one number per trajectory. `rewards_N` or `reward_components_NK`: once, for the whole batch.
`token_rewards_NT`: once, returns advantages per token, or a pair of advantages and the returns that a critic learns.

A group of equal rewards (max == min) gives exactly 0. Other systems divide the rounding error of its mean by a small epsilon, which gives
advantages of 0.8.
"""
