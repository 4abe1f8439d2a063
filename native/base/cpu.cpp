// placeholder translation unit until the kernels land
