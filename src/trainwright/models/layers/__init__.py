"""Functions and layers that several shipped models share: attention over heads, masks, activations, checks of sizes.

They have no weights; each model's file defines all of its layers.
"""
