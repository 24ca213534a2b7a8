#define KVSIFT_TABLE kGeneric
#define KVSIFT_NAME "generic"
#include "isa/kernels.inc"
