// Attention backward on Turing: backward_sm80.cu, its products, copies and reductions made of Turing's instructions.
#include "substitutes_sm75.cuh"
#include "backward_sm80.cu"
