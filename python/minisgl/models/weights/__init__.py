"""Weights of a model, from the files of its folder to its layers.

`loading` makes a model and fills it. `checkpoint` reads the tensors; `linear_loader` and `expert_loader` put them into
layers, in the form that `forms` decides. `online_quantization` rounds what is left.
"""
