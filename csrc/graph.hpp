// The attention-aware graph index: built from what sampled queries found, searched best first. No Python here.
#pragma once

#include "graph_build.hpp"
#include "graph_paper.hpp"
#include "graph_rows.hpp"
#include "graph_search.hpp"
