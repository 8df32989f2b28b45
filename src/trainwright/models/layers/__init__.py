"""What two or more of the shipped models share: attention over heads, masks, activations, checks of sizes.

Nothing here has weights of its own; each model's file holds all of its layers.
"""
