"""Several trainings on a machine share one process that reads (CoorDL; TensorSocket, arXiv 2409.18749)."""
