// Times the forward pass of a built llama.cpp, or a fork with the same C interface (ik_llama.cpp).
//
//   peer MODEL.gguf THREADS < commands
//
// benchmarks/decode_peers.py compiles this against a checkout of the peer and runs it. A command is
// one line: the number of sequences, of tokens of each that are read at once, and of steps after
// them; then the token ids, sequence by sequence, first those of the prompts. The answer is one
// line: the seconds of the prompts, then of each step. Every command starts with an empty context.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "llama.h"

// Options that only some forks have, set to what their own documentation calls the fast way.
template <class P> auto repack(P &params, int) -> decltype(params.repack_tensors, void()) {
    params.repack_tensors = true;
}
template <class P> void repack(P &, long) {}

using Tokens = std::vector<std::vector<llama_token>>;

static double read(llama_context *context, const Tokens &rows, size_t from, size_t to) {
    const int count = static_cast<int>(rows.size() * (to - from));
    llama_batch batch = llama_batch_init(count, 0, 1);
    batch.n_tokens = count;
    int at = 0;
    for (size_t row = 0; row < rows.size(); ++row)
        for (size_t token = from; token < to; ++token, ++at) {
            batch.token[at] = rows[row][token];
            batch.pos[at] = static_cast<llama_pos>(token);
            batch.n_seq_id[at] = 1;
            batch.seq_id[at][0] = static_cast<llama_seq_id>(row);
            batch.logits[at] = token + 1 == to;
        }
    const auto start = std::chrono::steady_clock::now();
    if (llama_decode(context, batch) != 0) {
        std::fprintf(stderr, "llama_decode failed\n");
        std::exit(1);
    }
    llama_synchronize(context);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    llama_batch_free(batch);
    return taken.count();
}

int main(int argc, char **argv) {
    if (argc != 3) {
        std::fprintf(stderr, "usage: peer MODEL.gguf THREADS < commands\n");
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    auto model_params = llama_model_default_params();
    model_params.use_mmap = false;  // weights in anonymous memory, as ours are
    repack(model_params, 0);
    llama_model *model = llama_model_load_from_file(argv[1], model_params);
    if (!model) {
        std::fprintf(stderr, "cannot load %s\n", argv[1]);
        return 1;
    }
    std::string line;
    while (std::getline(std::cin, line)) {
        std::istringstream words(line);
        size_t sequences = 0, prompt = 0, steps = 0;
        words >> sequences >> prompt >> steps;
        Tokens rows(sequences, std::vector<llama_token>(prompt + steps));
        for (auto &row : rows)
            for (auto &token : row) words >> token;
        auto params = llama_context_default_params();
        params.n_ctx = sequences * ((prompt + steps + 255) / 256 * 256);
        params.n_batch = std::max<size_t>(2048, sequences * prompt);
        params.n_ubatch = 512;
        params.n_seq_max = sequences;
        params.n_threads = params.n_threads_batch = std::atoi(argv[2]);
        llama_context *context = llama_init_from_model(model, params);
        if (!words || !context) {
            std::fprintf(stderr, "no context for: %.60s\n", line.c_str());
            return 1;
        }
        std::printf("%.9f", read(context, rows, 0, prompt));
        for (size_t step = 0; step < steps; ++step)
            std::printf(" %.9f", read(context, rows, prompt + step, prompt + step + 1));
        std::printf("\n");
        std::fflush(stdout);
        llama_free(context);
    }
    return 0;
}
