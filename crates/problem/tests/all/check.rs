//! Every way in which a problem can be wrong, and what its error says.

use etalon_problem::{
    Align, Attention, AttentionLse, Axis, Blocking, Error, Extents, Mask, NamedArray, Operand,
    Pass, Problem, Role, Sequences, Views, ViewsMut,
};
use ndarray::ArrayD;

const EXTENTS: Extents =
    Extents { batch: 2, query_heads: 6, key_heads: 3, queries: 5, keys: 7, dim: 4 };

fn attention() -> Attention {
    Attention::new(EXTENTS)
}

fn with(change: impl FnOnce(&mut Extents)) -> Attention {
    let mut extents = EXTENTS;
    change(&mut extents);
    Attention::new(extents).value_dim(4)
}

/// Both problems must refuse what their scores refuse, with the same words.
#[track_caller]
fn refused(problem: Attention, name: &str, found: &str) {
    let lse = AttentionLse { scores: problem.scores.clone() };
    let errors = [problem.check(), lse.check(), Problem::from(lse.clone()).check()];
    for error in errors {
        match error {
            Err(Error::Value { name: n, expected, found: f }) => {
                assert_eq!((n.as_str(), f.as_str()), (name, found), "expected {expected}");
                assert!(!expected.is_empty());
            }
            other => panic!("`{name}` = {found} gave {other:?}"),
        }
    }
}

#[test]
fn valid_problems_pass() {
    for problem in
        [attention(), with(|e| e.queries = 0), with(|e| e.keys = 0), with(|e| e.batch = 0)]
    {
        assert_eq!(problem.check(), Ok(()));
    }
    assert_eq!(attention().softmax_scale(0.0).softcap(1e-30).check(), Ok(()));
}

#[test]
fn extents() {
    refused(with(|e| e.key_heads = 0), "key_heads", "0");
    refused(with(|e| e.dim = 0), "dim", "0");
    refused(with(|e| e.query_heads = 7), "query_heads", "7");
    let error = attention().value_dim(0).check();
    assert_eq!(error, Err(Error::value("value_dim", "at least 1", 0)));
}

#[test]
fn options() {
    for scale in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        refused(attention().softmax_scale(scale), "softmax_scale", &scale.to_string());
    }
    for cap in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        refused(attention().softcap(cap), "softcap", &cap.to_string());
    }
    refused(attention().bias(3, 6), "bias.batch", "3");
    refused(attention().bias(0, 6), "bias.batch", "0");
    refused(attention().bias(1, 3), "bias.heads", "3"); // key heads are not query heads
    for (batch, heads) in [(1, 1), (1, 6), (2, 1), (2, 6)] {
        assert_eq!(attention().bias(batch, heads).check(), Ok(()));
    }
}

#[test]
fn shapes_that_cannot_be_addressed() {
    let huge = [
        with(|e| e.queries = usize::MAX),
        with(|e| e.keys = usize::MAX),
        with(|e| e.dim = usize::MAX),
        with(|e| (e.batch, e.queries) = (1 << 32, 1 << 32)),
        // Nothing is to be computed, but the shapes must still be representable.
        with(|e| (e.batch, e.queries, e.dim) = (0, 1 << 40, 1 << 40)),
        // q and k fit, the bias does not.
        with(|e| (e.queries, e.keys) = (1 << 31, 1 << 31)).bias(1, 1),
    ];
    for problem in huge {
        match problem.check() {
            Err(Error::Value { name, expected, .. }) => {
                assert!(name.starts_with("shape of "), "{name}");
                assert_eq!(expected, "addressable");
            }
            other => panic!("{:?} gave {other:?}", problem.scores.extents),
        }
    }
    // Only v and o are too large: attention_lse has neither.
    let wide = attention().value_dim(usize::MAX);
    assert!(wide.check().is_err());
    assert_eq!(AttentionLse { scores: wide.scores }.check(), Ok(()));
}

#[test]
fn lengths() {
    let lengths = |query: &[usize], key: &[usize]| {
        attention().sequences(Sequences::Lengths { query: query.to_vec(), key: key.to_vec() })
    };
    assert_eq!(lengths(&[5, 0], &[0, 7]).check(), Ok(()));
    refused(lengths(&[5, 6], &[7, 7]), "sequences.query", "6");
    refused(lengths(&[5, 5], &[8, 7]), "sequences.key", "8");
    refused(lengths(&[5], &[7, 7]), "sequences.query", "1");
    refused(lengths(&[5, 5], &[7, 7, 7]), "sequences.key", "3");
}

#[test]
fn packed_sequences() {
    let packed = |batch: usize, cu_query: &[usize], cu_key: &[usize]| {
        with(|e| e.batch = batch)
            .sequences(Sequences::Packed { cu_query: cu_query.to_vec(), cu_key: cu_key.to_vec() })
    };
    assert_eq!(packed(1, &[0, 3, 3, 4], &[0, 0, 7, 7]).check(), Ok(()));
    refused(packed(2, &[0, 5], &[0, 7]), "batch", "2");
    refused(packed(1, &[0, 5], &[0, 3, 7]), "sequences.cu_key", "3");
    refused(packed(1, &[0, 4, 3], &[0, 3, 7]), "sequences.cu_query", "4 before 3");
    refused(packed(1, &[0, 3, 4], &[0, 7, 6]), "sequences.cu_key", "7 before 6");
    refused(packed(1, &[0, 6], &[0, 7]), "sequences.cu_query", "6");
    refused(packed(1, &[0, 5], &[0, 8]), "sequences.cu_key", "8");
    refused(packed(1, &[1, 5], &[0, 7]), "sequences.cu_query", "1");
    refused(packed(1, &[], &[]), "sequences.cu_query", "none");
}

#[test]
fn masks() {
    for align in [Align::TopLeft, Align::BottomRight] {
        refused(attention().mask(Mask::ChunkedCausal { chunk: 0, align }), "mask.chunk", "0");
        // Also where it hides in a tree.
        let hidden = Mask::Or(vec![
            Mask::causal(),
            Mask::And(vec![Mask::ChunkedCausal { chunk: 0, align }]),
        ]);
        refused(attention().mask(hidden), "mask.chunk", "0");
    }
    let nested = |depth: usize| (0..depth).fold(Mask::Full, |mask, _| Mask::And(vec![mask]));
    assert_eq!(attention().mask(nested(32)).check(), Ok(()));
    refused(attention().mask(nested(33)), "mask", "deeper");
}

fn flags(shape: &[usize]) -> Mask {
    Mask::Array(NamedArray::new("allowed", shape, vec![true; shape.iter().product()]))
}

fn segments(query: [usize; 2], key: [usize; 2]) -> Mask {
    let ids = |name: &str, shape: [usize; 2]| {
        NamedArray::new(name, &shape, vec![0i64; shape.iter().product()])
    };
    Mask::Segments { query: ids("query_ids", query), key: ids("key_ids", key) }
}

#[test]
fn arrays_of_a_mask() {
    for shape in [[1, 1, 5, 7], [2, 1, 5, 7], [1, 6, 5, 7], [2, 6, 5, 7]] {
        assert_eq!(attention().mask(flags(&shape)).check(), Ok(()));
    }
    let wrong: [&[usize]; 6] =
        [&[1, 3, 5, 7], &[3, 1, 5, 7], &[1, 1, 7, 5], &[1, 1, 1, 7], &[5, 7], &[1, 1, 5, 7, 1]];
    for shape in wrong {
        match attention().mask(flags(shape)).check() {
            Err(Error::Shape { operand, found, .. }) => {
                assert_eq!((operand.as_str(), found.as_slice()), ("allowed", shape));
            }
            other => panic!("{shape:?} gave {other:?}"),
        }
    }
    assert_eq!(attention().mask(segments([2, 5], [2, 7])).check(), Ok(()));
    let shape = |operand: &str, expected: [usize; 2], found: [usize; 2]| {
        Err(Error::Shape {
            operand: operand.into(),
            expected: expected.into(),
            found: found.into(),
        })
    };
    let queries = attention().mask(segments([1, 5], [2, 7])).check();
    assert_eq!(queries, shape("query_ids", [2, 5], [1, 5]));
    let keys = attention().mask(segments([2, 5], [2, 5])).check();
    assert_eq!(keys, shape("key_ids", [2, 7], [2, 5]));
    // The shape is right, but elements are missing.
    let short = Mask::Array(NamedArray::new("allowed", &[1, 1, 5, 7], vec![true; 34]));
    refused(attention().mask(short), "allowed", "34 elements");
}

#[test]
fn arrays_that_were_never_bound() {
    let segments =
        Mask::Segments { query: NamedArray::unbound("a"), key: NamedArray::unbound("b") };
    let array = Mask::Array(NamedArray::unbound("c"));
    let mut problem = Problem::from(attention().mask(Mask::And(vec![segments, array])));
    let missing = |name: &str| {
        Err(Error::Missing { operand: name.into(), reason: "the mask names it".into() })
    };
    assert_eq!(problem.check(), missing("a"));

    let names: Vec<String> = problem.arrays().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["a", "b", "c"]);

    let ids = |name: &str| {
        Ok(match name {
            "a" => Some(NamedArray::new("a", &[2, 5], vec![0; 10])),
            "b" => Some(NamedArray::new("b", &[2, 7], vec![0; 14])),
            _ => None,
        })
    };
    assert_eq!(problem.bind(ids, |_| Ok(None)), missing("c"));
    let flags = |_: &str| Ok(Some(NamedArray::new("c", &[1, 1, 5, 7], vec![true; 35])));
    assert_eq!(problem.bind(ids, flags), Ok(()));
    assert_eq!(problem.check(), Ok(()));
}

#[test]
fn blocking() {
    let zero = |name: &str| Err(Error::value(name, "at least 1", 0));
    assert_eq!(Blocking::new(0, 1).check(), zero("blocking.queries"));
    assert_eq!(Blocking::new(1, 0).check(), zero("blocking.keys"));
    assert_eq!(Blocking::new(1, usize::MAX).check(), Ok(()));
}

/// An error is read by someone who does not know the code: it says what, what for, and what was.
#[test]
fn messages() {
    let message = |problem: Attention| problem.check().unwrap_err().to_string();
    assert_eq!(
        message(with(|e| e.query_heads = 7)),
        "`query_heads` must be a multiple of key_heads (3), found 7"
    );
    assert_eq!(message(attention().softcap(0.0)), "`softcap` must be finite and above 0, found 0");
    assert_eq!(
        message(attention().mask(flags(&[1, 1, 7, 5]))),
        "`allowed` must have shape [1, 1, 5, 7], found [1, 1, 7, 5]"
    );
    assert_eq!(
        message(attention().mask(Mask::Array(NamedArray::unbound("c")))),
        "`c` is missing: the mask names it"
    );
}

#[test]
fn operands_follow_the_pass() {
    let problem = Problem::from(attention().value_dim(3).sinks().bias(1, 6));
    let names = |pass: Pass, wanted: &[Role]| -> Vec<&'static str> {
        let operands = problem.operands(pass);
        operands.iter().filter(|o| wanted.contains(&o.role)).map(|o| o.name).collect()
    };
    let (given, absent) = (Role::Cotangent, Role::OptionalCotangent);
    assert_eq!(names(Pass::Forward, &[Role::Input]), ["q", "k", "v", "sinks", "bias"]);
    assert_eq!(names(Pass::Forward, &[Role::Output]), ["o", "lse"]);
    assert_eq!(names(Pass::Backward, &[given, absent]), ["dout", "dlse"]);
    for pass in [Pass::Backward, Pass::DoubleBackward, Pass::Jvp] {
        assert_eq!(names(pass, &[Role::Saved]), ["o", "lse"]);
    }
    assert_eq!(names(Pass::Backward, &[Role::Output]), ["dq", "dk", "dv", "dsinks", "dbias"]);
    assert_eq!(
        names(Pass::DoubleBackward, &[given, absent]),
        ["dout", "dlse", "ddq", "ddk", "ddv", "ddsinks", "ddbias", "cot_o", "cot_lse"]
    );
    assert_eq!(
        names(Pass::DoubleBackward, &[Role::Output]),
        ["gq", "gk", "gv", "gsinks", "gbias", "gdout", "gdlse"]
    );
    assert_eq!(names(Pass::Jvp, &[absent]), ["tq", "tk", "tv", "tsinks", "tbias"]);
    assert_eq!(names(Pass::Jvp, &[Role::Output]), ["to", "tlse"]);

    let shape = |operand: &str| -> Vec<usize> {
        let operands = problem.operands(Pass::Backward);
        operands.into_iter().find(|o: &Operand| o.name == operand).expect(operand).shape
    };
    assert_eq!(shape("dq"), [2, 6, 5, 4]);
    assert_eq!(shape("dk"), [2, 3, 7, 4]);
    assert_eq!(shape("dv"), [2, 3, 7, 3]);
    assert_eq!(shape("dout"), [2, 6, 5, 3]);
    assert_eq!(shape("dlse"), [2, 6, 5]);
    assert_eq!(shape("dsinks"), [6]);
    assert_eq!(shape("dbias"), [1, 6, 5, 7]);
}

#[test]
fn every_tensor_says_its_axes_and_its_option() {
    use Axis::{Batch, BatchOr1, Keys, Queries, QueryHeads, QueryHeadsOr1, ValueDim};
    let problem = Problem::from(attention().value_dim(3).bias(1, 6));
    let operand = |name: &str| problem.operand(name).expect(name);
    assert_eq!(operand("gbias").axes, [BatchOr1, QueryHeadsOr1, Queries, Keys]);
    assert_eq!(operand("dout").axes, [Batch, QueryHeads, Queries, ValueDim]);
    assert_eq!((operand("dout").primal, operand("ddbias").option), ("o", Some("bias")));
    // A tensor of an option that is not set does not exist, but its option is known.
    assert_eq!(problem.operand("dsinks"), None);
    assert_eq!(problem.table(Pass::Backward).option("dsinks"), Some("sinks"));
    for operand in Pass::ALL.into_iter().flat_map(|pass| problem.operands(pass)) {
        let extents: Vec<usize> = operand.axes.iter().map(|&axis| problem.extent(axis)).collect();
        assert_eq!(operand.shape, extents, "{}", operand.name);
    }
}

#[test]
fn a_call_is_refused_in_the_words_of_its_operands() {
    let problem = Problem::from(attention().value_dim(3));
    let array = |name: &str| ArrayD::<f32>::zeros(problem.operand(name).expect(name).shape);
    let [q, k, v, dout, o] = ["q", "k", "v", "dout", "o"].map(array);
    let lse = array("lse");
    let (mut dq, short, whole) = (array("dq"), ArrayD::<f32>::zeros(vec![2]), q.mapv(f64::from));
    let given = || Views::new().with("k", &k).with("v", &v).with("dout", &dout);
    let saved = || given().with("q", &q).with("o", &o).with("lse", &lse);
    let refused = |inputs: Views<'_>, recompute| {
        let outputs = ViewsMut::new();
        let refused = problem.check_call(Pass::Backward, &inputs, &outputs, recompute);
        refused.map(|_| ()).unwrap_err().to_string()
    };
    assert_eq!(refused(given(), true), "`q` is missing: the pass needs it");
    assert_eq!(
        refused(given().with("q", &q), false),
        "`o` is missing: the forward pass returns it; set `recompute` to compute it anew"
    );
    assert_eq!(
        refused(given().with("q", &short), true),
        "`q` must have shape [2, 6, 5, 4], found [2]"
    );
    assert_eq!(
        refused(saved().with("sinks", &short), false),
        "`sinks` was given, but the problem does not set `sinks`"
    );
    assert_eq!(
        refused(saved().with("dk", &k), false),
        "`dk` was given, but the pass has no such tensor"
    );
    assert_eq!(refused(saved().with("q", &q), false), "`q` must be one tensor, found two");
    assert_eq!(refused(given().with("q", &whole), true), "`k` must hold f64, as q does, found f32");
    let [wide_k, wide_v, wide_dout, wide_o, wide_lse] =
        [&k, &v, &dout, &o, &lse].map(|x| x.mapv(f64::from));
    let saved_as = |lse| given().with("q", &q).with("o", &o).with("lse", lse);
    assert_eq!(
        refused(saved_as(&wide_lse), false),
        "`lse` must hold f32, unless q holds f64, found f64"
    );
    let wide = Views::new().with("q", &whole).with("k", &wide_k).with("v", &wide_v);
    let wide = wide.with("dout", &wide_dout).with("o", &wide_o).with("lse", &lse);
    assert_eq!(refused(wide, false), "`lse` must hold f64, as q does, found f32");
    let outputs = ViewsMut::new().with("dq", &mut dq);
    assert!(problem.check_call(Pass::Backward, &saved(), &outputs, false).is_ok());
    assert!(problem.check_call(Pass::Step, &saved(), &outputs, false).is_err());
}
