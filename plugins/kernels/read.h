// Reading memory as fast as it goes: what the speed of everything else is measured against.
#pragma once
#include "export.h"

// *sink ^= all 32-bit words of data, xor-ed.   data: nbytes bytes, a multiple of 16; sink: one u32.
NEXTN_API cudaError_t nextn_read(const void* data, size_t nbytes, uint32_t* sink, cudaStream_t stream);
