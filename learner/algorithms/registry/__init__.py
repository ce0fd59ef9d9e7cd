"""What config may name: the homes of all variants, how one is called, and the presets. Imports no mathematics."""
