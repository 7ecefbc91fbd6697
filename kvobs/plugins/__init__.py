"""Entry points that serving engines call: each engine's plugin mechanism finds kvobs by itself.

They start kvobs in the engine's processes; what is observed there is the sources' affair.
"""
