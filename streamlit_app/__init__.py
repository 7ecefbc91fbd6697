"""The live view. Its pages read a store and nothing else; ``kvobs view`` starts it."""
