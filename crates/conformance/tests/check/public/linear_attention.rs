//! Linear attention.

use super::Bug;
use super::kernel::{State, Token, add, ask, decay, of_other, read, recurrence, right, with};
use crate::bench::{Bench, short_linear};
use etalon_conformance::tensor::Tensors;
use etalon_problem::{Decay, Dtype, LinearAttention, LinearExtents, Pass, Problem, TokenSequences};
use ndarray::{ArrayD, Axis as Along};

fn forward(problem: impl Into<Problem>) -> Bench {
    ask(problem, Pass::Forward, Dtype::F32)
}

/// A kernel's answer, by what it does with each token.
fn made(bench: Bench, token: impl Fn(&mut State, &Token<'_>) -> Vec<Vec<f64>>) -> (Bench, Tensors) {
    let got = with(&bench, recurrence(&bench, &token));
    (bench, got)
}

fn reads(s: &State, x: &Token<'_>) -> Vec<Vec<f64>> {
    x.q.iter().map(|q| read(s, q)).collect()
}

/// With states before and after, where D = E.
fn states() -> LinearAttention {
    short_linear().initial_state().final_state()
}

fn by_token() -> LinearAttention {
    short_linear().decay(Decay::PerToken).final_state()
}

/// A problem of linear attention as itself.
fn own(problem: &mut Problem) -> &mut LinearAttention {
    match problem {
        Problem::LinearAttention(x) => x,
        _ => panic!("no linear attention"),
    }
}

pub const BUGS: &[Bug] = &[
    Bug {
        story: "a token reads the state before its own key is added",
        ids: &["token-excluded"],
        make: || {
            made(forward(short_linear()), |s, x| {
                decay(s, x.g);
                let o = reads(s, x);
                add(s, x.k, x.v);
                o
            })
        },
    },
    Bug {
        story: "a token's key decays with the state",
        ids: &["decay-after-key"],
        make: || {
            made(forward(by_token()), |s, x| {
                add(s, x.k, x.v);
                decay(s, x.g);
                reads(s, x)
            })
        },
    },
    Bug {
        story: "the state decays after it is read",
        ids: &["decay-one-less", "query-decay-one-short"],
        make: || {
            made(forward(short_linear()), |s, x| {
                // Contributions before this token have not decayed by it yet.
                let mut before = s.clone();
                add(&mut before, x.k, x.v);
                right(s, x);
                reads(&before, x)
            })
        },
    },
    Bug {
        story: "the decay of the next token",
        ids: &["decay-of-next-row"],
        make: || {
            of_other(forward(by_token()), |_, x| {
                let g = x.get_mut("g").unwrap();
                *g = g.select(Along(2), &(0..21).map(|t| (t + 1) % 21).collect::<Vec<_>>());
            })
        },
    },
    Bug {
        story: "decays are taken to base 2",
        ids: &["decay-base-2"],
        make: || {
            made(forward(short_linear()), |s, x| {
                right(s, &Token { g: x.g * std::f64::consts::LN_2, ..*x })
            })
        },
    },
    Bug {
        story: "the exponent of the decay has the other sign",
        ids: &["decay-inverted"],
        make: || made(forward(short_linear()), |s, x| right(s, &Token { g: -x.g, ..*x })),
    },
    Bug {
        story: "decays of another head: the offset of the head is missing",
        ids: &["decay-of-first-head"],
        make: || {
            of_other(forward(by_token()), |_, x| {
                let g = x.get_mut("g").unwrap();
                *g = g.select(Along(1), &[0; 4]);
            })
        },
    },
    Bug {
        story: "resets are ignored",
        ids: &["decay-without-resets"],
        make: || {
            let mut bench = forward(by_token());
            let mut g = bench.values()["g"].clone();
            g.index_axis_mut(Along(2), 11).fill(f64::NEG_INFINITY);
            bench
                .inputs
                .insert("g".into(), etalon_conformance::tensor::Tensor::round(&g, Dtype::F32));
            made(bench, |s, x| {
                right(s, &Token { g: if x.g.is_finite() { x.g } else { 0.0 }, ..*x })
            })
        },
    },
    Bug {
        story: "chunks do not read the state before them",
        ids: &["chunks-of-16-alone"],
        make: || {
            made(forward(short_linear()), |s, x| {
                if x.t % 16 == 0 {
                    s.fill(0.0);
                }
                right(s, x)
            })
        },
    },
    Bug {
        story: "the initial state is ignored",
        ids: &["initial-state-absent"],
        make: || {
            made(forward(states()), |s, x| {
                if x.t == 0 {
                    s.fill(0.0);
                }
                right(s, x)
            })
        },
    },
    Bug {
        story: "the initial state is transposed",
        ids: &["initial-state-as-shked"],
        make: || {
            made(forward(states()), |s, x| {
                if x.t == 0 {
                    *s = s.t().to_owned();
                }
                right(s, x)
            })
        },
    },
    Bug {
        story: "the first token does not decay the initial state",
        ids: &["initial-state-undecayed"],
        make: || {
            made(forward(states()), |s, x| {
                right(s, &Token { g: if x.t == 0 { 0.0 } else { x.g }, ..*x })
            })
        },
    },
    Bug {
        story: "the final state is the initial one: never written",
        ids: &["copy"],
        make: || {
            let bench = forward(states());
            let state = bench.values()["initial_state"].clone();
            let got = with(&bench, [("final_state".to_string(), state)].into());
            (bench, got)
        },
    },
    Bug {
        story: "the final state lacks the tokens after the last whole chunk",
        ids: &["tokens-whole-chunks-of-16", "tokens-whole-chunks-of-32", "tail-of-tokens-dropped"],
        make: || {
            let bench = forward(states());
            let last = recurrence(&bench, &|s, x| {
                if x.t >= 16 { reads(s, x) } else { right(s, x) }
            });
            let got =
                with(&bench, [("final_state".to_string(), last["final_state"].clone())].into());
            (bench, got)
        },
    },
    Bug {
        story: "the final state is transposed",
        ids: &["layout"],
        make: || {
            let bench = forward(states());
            let state = recurrence(&bench, &right)["final_state"].clone();
            let state = state.permuted_axes(vec![0, 1, 3, 2]).as_standard_layout().into_owned();
            let got = with(&bench, [("final_state".to_string(), state)].into());
            (bench, got)
        },
    },
    Bug {
        story: "the scale is the default 1/√D, not the one of the caller",
        ids: &["scale-usual"],
        make: || {
            of_other(forward(short_linear().scale(0.3)), |problem, _| own(problem).scale = 0.25)
        },
    },
    Bug {
        story: "a state passes from one packed sequence to the next",
        ids: &["sequences-ignored", "sequences-padding-counts", "state-of-previous-sequence"],
        make: || {
            let extents = LinearExtents { batch: 1, ..short_linear().extents };
            let sequences = TokenSequences::Packed { cu_tokens: vec![0, 8, 21] };
            let problem = LinearAttention { extents, sequences, ..short_linear() };
            of_other(forward(problem), |problem, _| own(problem).sequences = TokenSequences::Dense)
        },
    },
    Bug {
        story: "keys of packed sequences are read without their offset",
        ids: &["k-without-offset"],
        make: || {
            let extents = LinearExtents { batch: 1, ..short_linear().extents };
            let sequences = TokenSequences::Packed { cu_tokens: vec![0, 8, 21] };
            let problem = LinearAttention { extents, sequences, ..short_linear() };
            of_other(forward(problem), |_, x| {
                let k = x.get_mut("k").unwrap();
                let order: Vec<usize> = (0..21).map(|t| if t < 8 { t } else { t - 8 }).collect();
                *k = k.select(Along(2), &order);
            })
        },
    },
    Bug {
        story: "query head h reads the state of key head h mod Hk",
        ids: &["heads-interleaved", "state-of-head-modulo"],
        make: || {
            let bench = forward(short_linear());
            let order = [0, 4, 1, 5, 2, 6, 3, 7];
            let back = [0, 2, 4, 6, 1, 3, 5, 7];
            let (problem, mut x) = (bench.problem.clone(), bench.values());
            x.insert("q".into(), x["q"].select(Along(1), &order));
            let o = bench.evaluate(&problem, &x)["o"].select(Along(1), &back);
            let got = with(&bench, [("o".to_string(), o)].into());
            (bench, got)
        },
    },
    Bug {
        story: "the gradient by the final state is dropped",
        ids: &["dfinal-state-dropped", "final-cotangent-ignored"],
        make: || {
            of_other(ask(states(), Pass::Backward, Dtype::F32), |_, x| {
                x.remove("dfinal_state");
            })
        },
    },
    Bug {
        story: "dg is not summed up over later tokens",
        ids: &["rows-not-summed"],
        make: || {
            let bench = ask(short_linear().decay(Decay::PerToken), Pass::Backward, Dtype::F64);
            let dg = bench.right()["dg"].numbers("dg").unwrap();
            let own = ArrayD::from_shape_fn(dg.raw_dim(), |at| {
                let next = if at[2] + 1 < 21 { dg[[at[0], at[1], at[2] + 1]] } else { 0.0 };
                dg[&at] - next
            });
            let got = with(&bench, [("dg".to_string(), own)].into());
            (bench, got)
        },
    },
    Bug {
        story: "the decay of a head has the gradient of the last batch element",
        ids: &["sum-of-last-batch-element-alone", "gate-gradient-of-last-element"],
        make: || {
            let bench = ask(short_linear(), Pass::Backward, Dtype::F64);
            let mut x = bench.values();
            x.get_mut("dout").unwrap().index_axis_mut(Along(0), 0).fill(0.0);
            let own = bench.evaluate(&bench.problem, &x)["dg_gamma"].clone();
            let got = with(&bench, [("dg_gamma".to_string(), own)].into());
            (bench, got)
        },
    },
    Bug {
        story: "dk lacks the scale",
        ids: &["factor", "no-scale-in-keys"],
        make: || {
            let bench = ask(short_linear(), Pass::Backward, Dtype::Bf16);
            let dk = bench.right()["dk"].numbers("dk").unwrap().mapv(|x| 4.0 * x);
            let got = with(&bench, [("dk".to_string(), dk)].into());
            (bench, got)
        },
    },
    Bug {
        story: "the state is stored in bf16",
        ids: &[],
        make: || {
            made(forward(short_linear()), |s, x| {
                s.mapv_inplace(|x| Dtype::Bf16.round(x));
                right(s, x)
            })
        },
    },
];
