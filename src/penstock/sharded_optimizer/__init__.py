"""A sharded optimizer: the holders of a parameter divide the state and the work of its updates.

Each parameter has one or more owners among its holders. Gradients are summed there and dropped elsewhere, so that any
optimizer passes over what a rank does not own and makes no state for it; after the optimizer's step the first owner
sends the new weights. It is ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020, section 5) with optimizer state and summed gradients divided, by whole parameters: unlike pipelines
have no slices in common, and updates such as Muon's need a whole matrix.
"""
