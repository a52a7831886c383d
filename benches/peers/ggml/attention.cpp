// Times causal attention on the CPU backend of ggml and prints the result as JSON.
//
//     attention [--heads H] [--length N] [--dim D] [--threads T] [--seconds S]
//
// One run is one computation of a graph whose only operation is ggml_flash_attn_ext: q, k and v in f32, batch 1, as
// many key heads as query heads, N queries and N keys, and an f16 mask that is 0 where j <= i and -inf elsewhere. The
// plan, its work buffer and its threads exist before the clock starts. As in `etalon bench`, the first run does not
// count, and the time is the median of as many runs as fit into S seconds, but of three at least.
//
// Before it times anything, the program compares a short problem of the same dim with a plain evaluation in double,
// and exits with status 1 if they differ.

#include <ggml-cpu.h>
#include <ggml.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

struct Arguments {
    int heads = 8;
    int length = 2048;
    int dim = 64;
    int threads = 1;
    double seconds = 1.0;
};

int positive(const std::string& name, const char* text) {
    const int value = std::atoi(text);
    if (value < 1) throw std::invalid_argument(name + " must be a positive integer");
    return value;
}

Arguments parse(int argc, char** argv) {
    Arguments arguments;
    for (int at = 1; at < argc; at += 2) {
        const std::string name = argv[at];
        if (at + 1 == argc) throw std::invalid_argument(name + " lacks a value, or is unknown");
        const char* value = argv[at + 1];
        if (name == "--heads") arguments.heads = positive(name, value);
        else if (name == "--length") arguments.length = positive(name, value);
        else if (name == "--dim") arguments.dim = positive(name, value);
        else if (name == "--threads") arguments.threads = positive(name, value);
        else if (name == "--seconds") arguments.seconds = std::atof(value);
        else throw std::invalid_argument(name + " is unknown");
    }
    return arguments;
}

// A problem with its tensors, its graph and its threads. Sizes in ggml's order: the innermost first.
class Attention {
  public:
    Attention(int heads, int length, int dim, int threads) : heads(heads), length(length), dim(dim) {
        const size_t operand = sizeof(float) * heads * length * dim;
        const size_t mask_bytes = sizeof(ggml_fp16_t) * length * length;
        const size_t bookkeeping = 16 * ggml_tensor_overhead() + ggml_graph_overhead();
        context = ggml_init({4 * operand + mask_bytes + bookkeeping, nullptr, false});
        if (!context) throw std::runtime_error("ggml_init failed");

        std::mt19937 random(1);
        q = normal(random);
        k = normal(random);
        v = normal(random);
        out = ggml_flash_attn_ext(context, q, k, v, causal_mask(), scale(), 0.0f, 0.0f);
        graph = ggml_new_graph(context);
        ggml_build_forward_expand(graph, out);

        ggml_threadpool_params params = ggml_threadpool_params_default(threads);
        pool = ggml_threadpool_new(&params);
        if (!pool) throw std::runtime_error("ggml_threadpool_new failed");
        plan = ggml_graph_plan(graph, threads, pool);
        work.resize(plan.work_size);
        plan.work_data = work.data();
    }

    ~Attention() {
        ggml_threadpool_free(pool);
        ggml_free(context);
    }

    Attention(const Attention&) = delete;
    Attention& operator=(const Attention&) = delete;

    void run() {
        if (ggml_graph_compute(graph, &plan) != GGML_STATUS_SUCCESS) throw std::runtime_error("ggml_graph_compute failed");
    }

    // The largest absolute difference between the latest run and the definition of causal attention.
    double max_error() const {
        double worst = 0.0;
        for (int h = 0; h < heads; ++h) {
            for (int i = 0; i < length; ++i) {
                const std::vector<double> expected = reference_row(h, i);
                // ggml's output has the heads inside the queries.
                const float* got = static_cast<const float*>(out->data) + size_t(dim) * (size_t(i) * heads + h);
                for (int d = 0; d < dim; ++d) {
                    const double error = std::abs(got[d] - expected[d]);
                    if (!(error <= worst)) worst = error; // NaN also lands here
                }
            }
        }
        return worst;
    }

  private:
    float scale() const { return 1.0f / std::sqrt(float(dim)); }

    ggml_tensor* normal(std::mt19937& random) {
        ggml_tensor* tensor = ggml_new_tensor_3d(context, GGML_TYPE_F32, dim, length, heads);
        std::normal_distribution<float> distribution;
        float* data = static_cast<float*>(tensor->data);
        std::generate_n(data, ggml_nelements(tensor), [&] { return distribution(random); });
        return tensor;
    }

    ggml_tensor* causal_mask() {
        ggml_tensor* mask = ggml_new_tensor_2d(context, GGML_TYPE_F16, length, length);
        const ggml_fp16_t visible = ggml_fp32_to_fp16(0.0f);
        const ggml_fp16_t hidden = ggml_fp32_to_fp16(-INFINITY);
        ggml_fp16_t* data = static_cast<ggml_fp16_t*>(mask->data);
        for (int i = 0; i < length; ++i) {
            for (int j = 0; j < length; ++j) *data++ = j <= i ? visible : hidden;
        }
        return mask;
    }

    const float* row(const ggml_tensor* tensor, int head, int index) const {
        return static_cast<const float*>(tensor->data) + size_t(dim) * (size_t(head) * length + index);
    }

    std::vector<double> reference_row(int h, int i) const {
        std::vector<double> scores;
        for (int j = 0; j <= i; ++j) {
            double dot = 0.0;
            for (int d = 0; d < dim; ++d) dot += double(row(q, h, i)[d]) * row(k, h, j)[d];
            scores.push_back(dot / std::sqrt(double(dim)));
        }
        const double max = *std::max_element(scores.begin(), scores.end());
        double sum = 0.0;
        std::vector<double> o(dim, 0.0);
        for (int j = 0; j <= i; ++j) {
            const double p = std::exp(scores[j] - max);
            sum += p;
            for (int d = 0; d < dim; ++d) o[d] += p * row(v, h, j)[d];
        }
        for (double& element : o) element /= sum;
        return o;
    }

    int heads, length, dim;
    ggml_context* context = nullptr;
    ggml_tensor *q = nullptr, *k = nullptr, *v = nullptr, *out = nullptr;
    ggml_cgraph* graph = nullptr;
    ggml_threadpool* pool = nullptr;
    ggml_cplan plan{};
    std::vector<uint8_t> work;
};

// Three tiles of 64 queries, the last of them not full: the kernel that is timed, with its edges.
double checked_error(int dim, int threads) {
    Attention small(2, 160, dim, threads);
    small.run();
    const double error = small.max_error();
    // Rounding in f32 stays below 1e-5 here; a wrong mask or scale changes elements by more than 0.1.
    if (!(error <= 1e-4)) throw std::runtime_error("the result is not causal attention: it is off by " + std::to_string(error));
    return error;
}

std::vector<int64_t> times_ns(Attention& attention, double seconds) {
    using Clock = std::chrono::steady_clock;
    attention.run();
    std::vector<int64_t> times;
    const auto begin = Clock::now();
    while (times.size() < 3 || std::chrono::duration<double>(Clock::now() - begin).count() < seconds) {
        const auto start = Clock::now();
        attention.run();
        times.push_back(std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count());
    }
    std::sort(times.begin(), times.end());
    return times;
}

// The widest instruction set that ggml was compiled for, among those that decide the speed of f32 arithmetic.
const char* level() {
    if (ggml_cpu_has_avx512()) return "avx512";
    if (ggml_cpu_has_avx2() && ggml_cpu_has_fma()) return "avx2";
    if (ggml_cpu_has_sve()) return "sve";
    if (ggml_cpu_has_neon()) return "neon";
    return "other";
}

void measure(const Arguments& arguments) {
    const double error = checked_error(arguments.dim, arguments.threads);
    Attention attention(arguments.heads, arguments.length, arguments.dim, arguments.threads);
    const std::vector<int64_t> times = times_ns(attention, arguments.seconds);
    std::printf("{\n");
    std::printf("  \"version\": \"%s\",\n", ggml_version());
    std::printf("  \"level\": \"%s\",\n", level());
    std::printf("  \"dtype\": \"f32\",\n");
    std::printf("  \"mask\": \"causal\",\n");
    std::printf("  \"heads\": %d,\n", arguments.heads);
    std::printf("  \"length\": %d,\n", arguments.length);
    std::printf("  \"dim\": %d,\n", arguments.dim);
    std::printf("  \"threads\": %d,\n", arguments.threads);
    std::printf("  \"checked_error\": %.3g,\n", error);
    std::printf("  \"runs\": %zu,\n", times.size());
    std::printf("  \"median_ns\": %lld\n", static_cast<long long>(times[times.size() / 2]));
    std::printf("}\n");
}

} // namespace

int main(int argc, char** argv) {
    try {
        measure(parse(argc, argv));
    } catch (const std::invalid_argument& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 2;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
