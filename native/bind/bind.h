// The parts of headrace._core, one function each.
#pragma once

#include <nanobind/nanobind.h>

namespace headrace {

void bind_ops(nanobind::module_& m);        // bind_ops.cpp: kernels, packed matrices, threads
void bind_attention(nanobind::module_& m);  // bind_attention.cpp: rope, KV pool, attention
void bind_measure(nanobind::module_& m);    // bind_measure.cpp: the machine's ceilings
void bind_store(nanobind::module_& m);      // bind_store.cpp: readers and the expert store
void bind_probe(nanobind::module_& m);      // bind_probe.cpp: how fast a drive gives records
void bind_trace(nanobind::module_& m);      // bind_trace.cpp: recorded traces and their replay

}  // namespace headrace
