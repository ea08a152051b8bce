// Prints the model's predictions for the samples of .npy files: one line of JSON for each sample.
#include <ATen/Version.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/version.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include "checksum.h"
#include "json.h"
#include "model.h"
#include "npy.h"

static_assert(TORCH_VERSION_MAJOR == kTorchMajor && TORCH_VERSION_MINOR == kTorchMinor,
              "model.pt2 was compiled for another LibTorch: see model.h");

static void predict(int count, char** words) {
  const int files = static_cast<int>(kInputs.size());
  const std::string usage = "usage: predict model.pt2 INPUTS.npy [--batch N]";
  const bool batched = count == 4 + files && std::string(words[2 + files]) == "--batch";
  if (count != 2 + files && !batched) throw std::runtime_error(usage);
  const std::string cpu = at::get_cpu_capability();
  if (kInstructionSet == "AVX2" && cpu != "AVX2" && cpu != "AVX512")
    throw std::runtime_error("model.pt2 needs a processor with AVX2, and this one has " + cpu);

  std::vector<at::Tensor> inputs;  // each [N, ...]
  for (int i = 0; i < files; ++i) inputs.push_back(read_npy(words[2 + i], kInputs[i]));
  const int64_t samples = inputs[0].size(0);
  for (const auto& one : inputs)
    if (one.size(0) != samples) throw std::runtime_error("the files have different numbers of samples");
  const int64_t batch = batched ? std::atoll(words[3 + files]) : samples;
  if (samples < 1 || batch < 1) throw std::runtime_error("there is no sample: give at least one, and --batch 1 or more");

  check_package(words[1]);
  c10::InferenceMode inference;
  torch::inductor::AOTIModelPackageLoader model(words[1]);
  for (int64_t first = 0; first < samples; first += batch) {
    std::vector<at::Tensor> part;
    for (const auto& one : inputs) part.push_back(one.narrow(0, first, std::min(batch, samples - first)));
    print_lines(model.run(part), part[0].size(0));
  }
}

int main(int count, char** words) {
  try {
    predict(count, words);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "predict: %.2000s\n", error.what());
    return 2;
  }
}
