"""Restore a cached prefix's KV by recomputing part of it while loading the rest."""
