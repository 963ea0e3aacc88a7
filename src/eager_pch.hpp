#pragma once

#include <torch/nn/functional.h>
#include <torch/nn/modules.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>
#include <torch/optim.h>
#include <torch/serialize.h>

#include "pch.hpp"
