"""GPU kernels. Each module has the functions of its torch namesake in engine.kernels, same signatures.

State arithmetic is fp32: matmuls on fp32 tiles split each operand into three TF32 parts (fp32 accuracy on tensor
cores). Nothing here imports at engine start: a worker on a CPU never loads triton.
"""
