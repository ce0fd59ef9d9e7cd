"""The names that config may use: homes of the variants, their signatures, presets. Imports no mathematics."""
