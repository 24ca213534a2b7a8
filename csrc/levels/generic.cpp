#define KVSIFT_TABLE kGeneric
#define KVSIFT_NAME "generic"
#include "levels/kernels.inc"
