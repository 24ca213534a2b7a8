#define KVSIFT_TABLE kAvx2
#define KVSIFT_NAME "avx2"
#include "isa/kernels.inc"
