// Compresses a trained network through the library: removes 30 % of the channels, folds the batch norms, quantizes the
// Linear layers to INT8 with calibrated activations, and saves what is left.
//
//   03_compress [DIRECTORY]     reads cnn.pt and calibration.safetensors (example 01 writes them), writes cnn-small.pt
#include <filesystem>
#include <iostream>

#include "tersor/tersor.hpp"

int main(int argc, char** argv) try {
  if (argc > 1) std::filesystem::current_path(argv[1]);
  // [README]
  const tersor::Dataset calibration = tersor::read_dataset("calibration.safetensors");
  tersor::Model model = tersor::Model::load("cnn.pt");
  model.set_example(calibration.slice(0, 2).inputs);

  const tersor::Pipeline pipeline{
      tersor::prune::Structured{.amount = 0.3},
      tersor::fold::BatchNorm{},
      tersor::quantize::Static{},
  };
  const tersor::Report report = pipeline.run(model, {.calibration = calibration});

  model.save("cnn-small.pt", {.overwrite = true});
  std::cout << report.table();
  // [/README]
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
