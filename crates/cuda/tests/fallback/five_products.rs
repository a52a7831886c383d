//! Attention of five products on sm90a: its gradients are those of the portable level, and no bit depends on which are
//! asked for, on batch elements beside it, or on how a mask is told.

use super::*;

/// The gradients that somebody may ask for together.
const SOME: [&[&str]; 6] = [&ALL, &["dk", "dv"], &["dq", "dv"], &["dq"], &["dk"], &["dv"]];

/// Masks of which sm90a has a pass of five products, for 333 or 700 queries and 517 keys.
fn masks() -> [(Mask, usize); 4] {
    let windows = Mask::Window { left: Some(200), right: Some(40), align: Align::BottomRight };
    [(Mask::causal(), 333), (Mask::causal(), 700), (Mask::Full, 333), (windows, 333)]
}

/// Attention of which sm90a has a pass of five products, with 517 keys.
fn fused_attention(batch: usize) -> Vec<Attention> {
    let mut all = Vec::new();
    for (mask, queries) in masks() {
        for (dim, softcap) in [(64, None), (128, None), (64, Some(1.5)), (128, Some(1.5))] {
            let extents = Extents { batch, query_heads: 4, key_heads: 2, queries, keys: 517, dim };
            let mut attention = Attention::new(extents).mask(mask.clone());
            attention.scores.softcap = softcap;
            all.push(attention);
        }
    }
    all
}

/// The same with a bias that the copy engine reads: each head's own, or one that batch elements or heads share.
fn biased_attention() -> Vec<Attention> {
    let mut all = Vec::new();
    for ((mask, queries), (batch, heads)) in masks().into_iter().zip([(2, 4), (2, 4), (1, 4), (2, 1)]) {
        // Rows of the bias begin at multiples of 16 bytes, or are copied to such.
        for (keys, dim) in [(512, 128), (517, 72)] {
            let extents = Extents { batch: 2, query_heads: 4, key_heads: 2, queries, keys, dim };
            let mut attention = Attention::new(extents).mask(mask.clone());
            attention.scores.bias = Some(BiasExtents { batch, heads });
            all.push(attention);
        }
    }
    all
}

fn five(mode: Mode) -> Options {
    Options { mode, ..flash(Level::Sm90a) }
}

/// Five products give the gradients of the portable level, with a NaN in a row of keys that not every query sees; and
/// again the same bits, which those that are asked for alone have, too, also where they are below the normal numbers.
#[test]
fn five_products_give_the_bits_of_seven() {
    let Some(whole) = without(0) else { return };
    for form in fused_attention(2).into_iter().chain(biased_attention()) {
        let (keys, problem) = (form.scores.extents.keys, Problem::from(form));
        let portable = Options { level: Level::Portable, ..Options::default() };
        for row in [keys, 300] {
            let inputs = inputs(&whole, &problem, |name, at| name == "k" && at[..3] == [0, 1, row]);
            let wanted = gradients(&whole, &problem, &inputs, &ALL, &portable);
            let found = gradients(&whole, &problem, &inputs, &ALL, &five(Mode::FusedPartials));
            assert!(agree(&found, &wanted), "{problem:?}, NaN in key {row}");
        }
        for small in [1.0, 1e-36, 3e-38] {
            let mut inputs = inputs(&whole, &problem, |_, _| false);
            inputs.0.get_mut("dout").unwrap().mapv_inplace(|x| bf16::from_f32(x.to_f32() * small));
            let wanted = gradients(&whole, &problem, &inputs, &ALL, &five(Mode::FusedPartials));
            for (mode, names) in [Mode::FusedPartials, Mode::Separate].into_iter().flat_map(|x| SOME.map(|y| (x, y))) {
                for (name, found) in gradients(&whole, &problem, &inputs, names, &five(mode)) {
                    assert_eq!(words(&found), words(&wanted[name]), "{problem:?} {small} {mode:?} {names:?}: {name}");
                }
            }
        }
    }
}

/// The gradient of a bias is that of the portable level, with a NaN in a row of keys that not every query sees, which
/// leaves those of other groups their bits; and it has the same bits beside other gradients and alone.
#[test]
fn gradients_of_a_bias_are_those_of_groups_alone() {
    let Some(whole) = without(0) else { return };
    let portable = Options { level: Level::Portable, ..Options::default() };
    let options = flash(Level::Sm90a);
    for problem in biased_attention().into_iter().map(Problem::from) {
        let of = |row: Option<usize>| {
            let inputs = inputs(&whole, &problem, |name, at| name == "k" && at[..2] == [0, 1] && Some(at[2]) == row);
            let found = gradients(&whole, &problem, &inputs, &["dq", "dk", "dv", "dbias"], &options);
            let wanted = gradients(&whole, &problem, &inputs, &["dbias"], &portable);
            let own = Tensors::from([("dbias", found["dbias"].clone())]);
            assert!(agree(&own, &wanted), "{problem:?}, NaN in key {row:?}");
            let alone = gradients(&whole, &problem, &inputs, &["dbias"], &options);
            assert_eq!(words(&alone["dbias"]), words(&found["dbias"]), "{problem:?} alone");
            found["dbias"].clone()
        };
        let [clean, struck] = [None, Some(300)].map(of);
        // A sum that begins with 0 is no −0, as products with a weight of 0 are.
        assert!(clean.iter().all(|x| x.to_bits() != bf16::NEG_ZERO.to_bits()), "{problem:?}: a dbias of −0");
        // Query heads 2 and 3 of batch element 0 are the group of the NaN.
        if clean.shape()[..2] == [2, 4] {
            let others = |x: &ArrayD<bf16>| {
                let own = x.indexed_iter().filter(|(at, _)| at[0] == 1 || at[1] < 2);
                own.map(|(_, x)| x.to_bits()).collect::<Vec<_>>()
            };
            assert_eq!(others(&struck), others(&clean), "{problem:?}");
        }
    }
}

/// Biases of the least finite number, whose score over the unit of sm90a is not finite, hide a key beside others, and
/// none where all are such or −∞. So say the kernels without a flag.
#[test]
fn the_least_bias_hides_no_pair() {
    let Some(bare) = without(NONE) else { return };
    for problem in biased_attention().into_iter().map(Problem::from) {
        let mut all = inputs(&bare, &problem, |_, _| false).0;
        all.get_mut("bias").unwrap().indexed_iter_mut().for_each(|(at, x)| {
            let (query, key) = (at[2], at[3]);
            match query % 4 {
                0 => *x = bf16::MIN,
                1 => *x = if key % 2 == 0 { bf16::MIN } else { bf16::NEG_INFINITY },
                2 if key != query / 2 => *x = bf16::NEG_INFINITY,
                3 if key % 3 == 0 => *x = bf16::MIN,
                _ => {}
            }
        });
        let [found, wanted] = [flash(Level::Sm90a), Options { level: Level::Portable, ..Options::default() }]
            .map(|options| Tensors::from([("o", outputs(&bare, &problem, &all, &options).0)]));
        assert!(agree(&found, &wanted), "{problem:?}");
    }
}

/// A mask that is a table of ranges of keys has the bits of the mask of five products that it says again: with all
/// rows in one segment.
#[test]
fn tables_of_spans_have_the_bits_of_five_products() {
    let Some(whole) = without(0) else { return };
    for form in fused_attention(2).into_iter().chain(biased_attention()) {
        let e = form.scores.extents;
        let ids = |name, rows| NamedArray::new(name, &[e.batch, rows], vec![0; e.batch * rows]);
        let segment = Mask::Segments { query: ids("query_ids", e.queries), key: ids("key_ids", e.keys) };
        let mut table = form.clone();
        table.scores.mask = Mask::And(vec![form.scores.mask.clone(), segment]);
        let (form, table): (Problem, Problem) = (form.into(), table.into());
        let inputs = inputs(&whole, &form, |_, _| false);
        let wanted = gradients(&whole, &form, &inputs, &ALL, &five(Mode::FusedPartials));
        for (name, found) in
            SOME.iter().flat_map(|names| gradients(&whole, &table, &inputs, names, &flash(Level::Sm90a)))
        {
            assert_eq!(words(&found), words(&wanted[name]), "{table:?}: {name}");
        }
    }
}

/// Packed sequences have the bits that five products give each of them alone.
#[test]
fn packed_sequences_have_the_bits_of_five_products() {
    let Some(whole) = without(0) else { return };
    let (cu_query, cu_key) = (vec![0, 333, 334, 1034], vec![0, 517, 700, 1217]);
    for form in fused_attention(1) {
        let mut packed = form.clone();
        (packed.scores.extents.queries, packed.scores.extents.keys) = (1034, 1217);
        packed.scores.sequences = Sequences::Packed { cu_query: cu_query.clone(), cu_key: cu_key.clone() };
        let packed: Problem = packed.into();
        let inputs = inputs(&whole, &packed, |_, _| false);
        let together = SOME.map(|names| gradients(&whole, &packed, &inputs, names, &flash(Level::Sm90a)));
        for i in 0..cu_query.len() - 1 {
            let [queries, keys] = [&cu_query, &cu_key].map(|cu| cu[i]..cu[i + 1]);
            let rows = |name: &str, x: &ArrayD<bf16>| {
                let own = if matches!(name, "k" | "v" | "dk" | "dv") { keys.clone() } else { queries.clone() };
                x.slice_axis(Axis(2), own.into()).as_standard_layout().into_owned()
            };
            let own = inputs.0.iter().map(|(&name, x)| (name, rows(name, x))).collect();
            let lse = inputs.1.slice_axis(Axis(2), queries.clone().into()).as_standard_layout().into_owned();
            let mut alone = form.clone();
            (alone.scores.extents.queries, alone.scores.extents.keys) = (queries.len(), keys.len());
            let alone: Problem = alone.into();
            let wanted = gradients(&whole, &alone, &(own, lse), &ALL, &five(Mode::FusedPartials));
            for (name, found) in together.iter().flatten() {
                assert_eq!(words(&rows(name, found)), words(&wanted[name]), "{form:?} sequence {i}: {name}");
            }
        }
    }
}
