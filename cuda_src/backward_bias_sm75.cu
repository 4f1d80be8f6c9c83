// After a backward with a bias on Turing: backward_bias.cu, reading dbias_accum in the order that backward_sm75.cu adds to it.
#include "substitutes_sm75.cuh"
#include "backward_bias.cu"
