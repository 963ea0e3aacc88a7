#pragma once

// Everything, for trying out. In a project, include what you use: it compiles faster.
#include "tersor/core/error.hpp"
#include "tersor/distill/knowledge_distillation.hpp"
#include "tersor/io/dataset.hpp"
#include "tersor/model/model.hpp"
#include "tersor/passes/fold.hpp"
#include "tersor/passes/prune.hpp"
#include "tersor/passes/quantize.hpp"
#include "tersor/passes/registry.hpp"
#include "tersor/pipeline/pipeline.hpp"
#include "tersor/version.hpp"
