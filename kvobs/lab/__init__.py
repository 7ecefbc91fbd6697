"""The laboratory: a demonstration with a real model, and (one module each) experiments of the reference article."""
