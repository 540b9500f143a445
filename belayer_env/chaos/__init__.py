"""Fault injection on real episodes, and the proof that the agent could not tell."""
