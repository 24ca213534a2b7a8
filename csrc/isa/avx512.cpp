#define KVSIFT_TABLE kAvx512
#define KVSIFT_NAME "avx512"
#include "isa/kernels.inc"
