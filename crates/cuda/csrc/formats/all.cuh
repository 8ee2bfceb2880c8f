// Every format that quantize_units and dequantize_units take: a file each, and its line in the table of src/ops/convert/units.rs.
#pragma once
#include "formats/fp8.cuh"
#include "formats/hif4.cuh"
#include "formats/mxfp4.cuh"
#include "formats/mxfp6.cuh"
#include "formats/mxfp8.cuh"
#include "formats/mxint8.cuh"
#include "formats/nvfp4.cuh"
