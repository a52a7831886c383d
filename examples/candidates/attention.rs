//! Attention in Rust: rustc -O attention.rs && etalon verify --candidate ./attention

use std::io::{Read, Result, Write, stdin, stdout};

/// The kernel: o and lse of one query, of the keys and values that it sees.
fn attend(q: &[f32], keys: &[f32], values: &[f32], o: &mut [f32]) -> f32 {
    let dot = |k: &[f32]| q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>();
    let s: Vec<f64> = keys.chunks(q.len()).map(|k| dot(k) / (q.len() as f64).sqrt()).collect();
    let m = s.iter().fold(f64::NEG_INFINITY, |m, &s| if s > m || s.is_nan() { s } else { m });
    let p = |s: f64| if s == f64::NEG_INFINITY { 0.0 } else { (s - m).exp() };
    let l: f64 = s.iter().map(|&s| p(s)).sum();
    for (e, o) in o.iter_mut().enumerate() {
        let seen = s.iter().enumerate().filter(|(_, s)| p(**s) != 0.0);
        let width = values.len() / s.len().max(1);
        *o = seen.map(|(j, &s)| p(s) / l * f64::from(values[j * width + e])).sum::<f64>() as f32;
    }
    (m + l.ln()) as f32
}

/// Every query: o and lse, where `q` is `[batch, heads, queries, d]`.
fn attention(q: Rows, k: Rows, v: Rows, causal: bool) -> (Vec<f32>, Vec<f32>) {
    let ([_, heads, queries, d], [_, key_heads, keys, _], e) = (q.shape, k.shape, v.shape[3]);
    let rows = q.shape[..3].iter().product();
    let (mut o, mut lse) = (vec![0.0; rows * e], vec![0.0; rows]);
    for row in 0..rows {
        let first = row / queries * key_heads / heads * keys; // the first key of its head
        let after = (row % queries + 1 + keys).saturating_sub(queries);
        let seen = if causal { after } else { keys };
        let (k, v) = (&k.data[first * d..][..seen * d], &v.data[first * e..][..seen * e]);
        lse[row] = attend(&q.data[row * d..][..d], k, v, &mut o[row * e..][..e]);
    }
    (o, lse)
}

/// Numbers row by row.
struct Rows {
    shape: [usize; 4],
    data: Vec<f32>,
}

const TAKES: &str = r#"{"kernels": [{"algorithm": "attention", "passes": ["forward"],
    "dtypes": ["f32"], "masks": ["full", "causal"], "align": ["bottom_right"],
    "sequences": ["dense"], "options": {}}]}"#;

// The harness.
fn word(bytes: &[u8], at: usize) -> usize {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize
}

fn send(kind: u32, words: [usize; 6], body: &[u8]) -> Result<()> {
    let words = words.map(|x| (x as u64).to_le_bytes()).concat();
    let head = [b"etalon\r\n", &1_u32.to_le_bytes()[..], &kind.to_le_bytes(), &words].concat();
    stdout().write_all(&[&head, body].concat())?;
    stdout().flush()
}

fn main() -> Result<()> {
    let mut head = [0; 64];
    while stdin().read_exact(&mut head).is_ok() {
        let [id, tensors, json, text, size] = [16, 24, 32, 40, 48].map(|at| word(&head, at));
        let mut body = vec![0; 128 * tensors + size + json + text];
        stdin().read_exact(&mut body)?;
        if head[12] == 1 {
            send(1, [id, 0, TAKES.len(), 4, 0, 0], &[TAKES, "rust"].concat().into_bytes())?;
            continue;
        }
        let (table, data) = body.split_at(128 * tensors);
        let lines = String::from_utf8_lossy(&data[size + json..]);
        let tensor = |row: usize| {
            let field = |at: usize| word(table, 128 * row + at);
            let number = |x: &[u8]| f32::from_le_bytes(x.try_into().unwrap());
            let data = data[field(112)..][..field(120)].chunks(4).map(number).collect();
            Rows { shape: [64, 72, 80, 88].map(field), data }
        };
        let (k, q, v) = (tensor(0), tensor(1), tensor(2)); // inputs by name, then results
        let (o, lse) = attention(q, k, v, lines.contains("problem.mask.causal"));
        let mut rows = table[128 * 3..].to_vec();
        (rows[60], rows[128 + 60]) = (0, 0); // tensors with elements
        rows[128 + 112..][..8].copy_from_slice(&(4 * o.len() as u64).to_le_bytes());
        let numbers: Vec<u8> = [o, lse].concat().into_iter().flat_map(f32::to_le_bytes).collect();
        send(3, [id, 2, 0, 0, numbers.len(), 0], &[rows, numbers].concat())?;
    }
    Ok(())
}
