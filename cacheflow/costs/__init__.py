"""Costs: estimated seconds of ops. roofline from a model's shape and device numbers; measured on this machine."""
