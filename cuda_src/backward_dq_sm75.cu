// After the backward on Turing: backward_dq.cu, reading dq_accum in the order that backward_sm75.cu adds to it.
#include "substitutes_sm75.cuh"
#include "backward_dq.cu"
