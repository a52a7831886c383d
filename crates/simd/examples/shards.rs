//! Linear cross-entropy with its classes in shards, a process for each: the results have the bits of one
//! process.
//!
//! `cargo run --release --example shards` starts four processes of itself. Each makes its own rows of w,
//! and talks to the first process over a socket: it sends its partials, gets the totals, and sends its
//! rows of dw and its parts of dh. Between machines an all-gather and a reduction take the place of this
//! star. The exit status is not 0 if some bit differs.

use etalon_problem::LinearCrossEntropy;
use etalon_problem::TokenOutputs;
use etalon_simd::linear_cross_entropy::shard::{
    Dh, Partial, Shard, backward_shard, combine, combine_dh, forward_shard, output,
};
use etalon_simd::linear_cross_entropy::{Cotangents, Inputs, Output, backward, forward};
use etalon_simd::{Element, Options};
use half::bf16;
use ndarray::{Array1, Array2, Array3, ArrayView, Dimension, arr0};
use std::error::Error;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::process::{Child, Command, ExitCode};

type Outcome<X> = Result<X, Box<dyn Error>>;

/// Borders of the shards, in tiles of 256 classes: uneven, not all of them nodes of the tree, one without
/// classes; the last tile is not full.
const BORDERS: [usize; 5] = [0, 3, 3, 8, 12];

fn problem() -> LinearCrossEntropy {
    let outputs = TokenOutputs { lse: true, logprob: true, entropy: true, argmax: true };
    LinearCrossEntropy::new(300, 64, 11 * 256 + 99).label_smoothing(0.1).outputs(outputs)
}

/// The classes of a rank.
fn classes(problem: &LinearCrossEntropy, rank: usize) -> Range<usize> {
    let border = |rank: usize| problem.vocab.min(BORDERS[rank] * 256);
    border(rank)..border(rank + 1)
}

/// An element of a tensor, a number between −1 and 1 that depends on its place alone: a rank makes its
/// own rows of w.
fn element(tensor: u64, row: usize, col: usize) -> bf16 {
    let mut x = tensor << 60 ^ (row as u64) << 30 ^ col as u64;
    for _ in 0..2 {
        x = (x ^ x >> 32).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
    bf16::from_f32((x >> 40) as f32 / (1 << 23) as f32 - 1.0)
}

/// Tensors that every rank has: h, targets and the cotangent of the loss; and some rows of w.
struct Tensors {
    h: Array2<bf16>,
    w: Array2<bf16>,
    targets: Array1<i64>,
}

impl Tensors {
    fn new(problem: &LinearCrossEntropy, classes: Range<usize>) -> Self {
        let LinearCrossEntropy { tokens, dim, vocab, .. } = *problem;
        let target = |i: usize| if i % 11 == 5 { -100 } else { (i * 389 % vocab) as i64 };
        Tensors {
            h: Array2::from_shape_fn((tokens, dim), |(i, c)| element(1, i, c)),
            w: Array2::from_shape_fn((classes.len(), dim), |(v, c)| {
                element(2, classes.start + v, c)
            }),
            targets: (0..tokens).map(target).collect(),
        }
    }

    fn inputs(&self) -> Inputs<'_, bf16> {
        Inputs::new(self.h.view(), self.w.view(), self.targets.view())
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let outcome = match &arguments[1..] {
        [address, rank] => rank.parse().map_err(Into::into).and_then(|r| take_part(address, r)),
        _ => lead(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// A rank: both passes over its classes.
fn take_part(address: &str, rank: usize) -> Outcome<()> {
    let (problem, options) = (problem(), Options::default());
    let mut leader = TcpStream::connect(address)?;
    leader.write_all(&(rank as u32).to_le_bytes())?;
    let shard = Shard::new(&problem, classes(&problem, rank))?;
    let tensors = Tensors::new(&problem, shard.classes());
    let inputs = tensors.inputs();
    send_partials(&mut leader, forward_shard(&shard, &inputs, &options)?.iter())?;
    let totals = Array1::from(receive_partials(&mut leader, problem.tokens)?);
    // Every rank has the loss now.
    let loss = output(&shard, &inputs, totals.view())?.loss;
    let dloss = arr0(1.0f32).into_dyn();
    let cotangents = Cotangents::default().dloss(dloss.view());
    let gradients =
        backward_shard(&shard, &inputs, totals.view(), &cotangents, Dh::Nodes, &options)?;
    println!("rank {rank}, classes {:?}: loss {}", shard.classes(), loss[[]]);
    send_floats(&mut leader, gradients.dh.view())?;
    send_floats(&mut leader, gradients.dw.mapv(bf16::to_f32).view())
}

/// The first process: starts the others, puts together what they return, and compares.
fn lead() -> Outcome<()> {
    let problem = problem();
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?.to_string();
    let start = |rank: usize| {
        Command::new(std::env::current_exe()?).args([&address, &rank.to_string()]).spawn()
    };
    let mut ranks = (0..BORDERS.len() - 1).map(start).collect::<Result<Vec<_>, _>>()?;
    let outcome = accept(&listener, &mut ranks).and_then(|streams| gather(&problem, streams));
    for rank in &mut ranks {
        if outcome.is_err() {
            rank.kill()?;
        }
        if !rank.wait()?.success() && outcome.is_ok() {
            return Err("a rank failed".into());
        }
    }
    let (output, dh, dw) = outcome?;
    compare(&problem, &output, &dh, &dw)
}

/// The connections to all ranks, in their order. Fails if one of them ends before it connects.
fn accept(listener: &TcpListener, ranks: &mut [Child]) -> Outcome<Vec<TcpStream>> {
    listener.set_nonblocking(true)?;
    let mut streams: Vec<(u32, TcpStream)> = Vec::new();
    while streams.len() < ranks.len() {
        match listener.accept() {
            Ok((mut stream, _)) => {
                stream.set_nonblocking(false)?;
                streams.push((receive_word(&mut stream)?, stream));
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                for rank in &mut *ranks {
                    if rank.try_wait()?.is_some_and(|status| !status.success()) {
                        return Err("a rank failed".into());
                    }
                }
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            Err(error) => return Err(error.into()),
        }
    }
    streams.sort_by_key(|(rank, _)| *rank);
    Ok(streams.into_iter().map(|(_, stream)| stream).collect())
}

/// Both passes from what the ranks send: the output, dh and dw.
fn gather(
    problem: &LinearCrossEntropy,
    mut streams: Vec<TcpStream>,
) -> Outcome<(Output<bf16>, Array2<bf16>, Array2<bf16>)> {
    let LinearCrossEntropy { tokens, dim, vocab, .. } = *problem;
    let ranges: Vec<_> = (0..streams.len()).map(|rank| classes(problem, rank)).collect();
    let nodes = |classes: &Range<usize>| -> Outcome<usize> {
        Ok(Shard::new(problem, classes.clone())?.nodes().count())
    };
    let mut partials = Vec::new();
    for (classes, stream) in ranges.iter().zip(&mut streams) {
        let shape = (nodes(classes)?, tokens);
        let rows = receive_partials(stream, shape.0 * tokens)?;
        partials.push((classes.clone(), Array2::from_shape_vec(shape, rows)?));
    }
    let views: Vec<_> = partials.iter().map(|(classes, x)| (classes.clone(), x.view())).collect();
    let totals = combine(problem, &views)?;
    streams.iter_mut().try_for_each(|stream| send_partials(stream, totals.iter()))?;
    // Of no classes: what the outputs follow from, every rank has.
    let tensors = Tensors::new(problem, 0..0);
    let output = output(&Shard::new(problem, 0..0)?, &tensors.inputs(), totals.view())?;
    let (mut parts, mut dw) = (Vec::new(), Vec::new());
    for (classes, stream) in ranges.iter().zip(&mut streams) {
        let shape = (nodes(classes)?, tokens, dim);
        let sums = receive_floats(stream, shape.0 * tokens * dim)?;
        parts.push((classes.clone(), Array3::from_shape_vec(shape, sums)?));
        dw.extend(receive_floats(stream, classes.len() * dim)?.into_iter().map(bf16::from_f32));
    }
    let views: Vec<_> = parts.iter().map(|(classes, x)| (classes.clone(), x.view())).collect();
    let dh = combine_dh(problem, &views)?;
    Ok((output, dh, Array2::from_shape_vec((vocab, dim), dw)?))
}

/// Fails if a bit differs from those of one process.
fn compare(
    problem: &LinearCrossEntropy,
    output: &Output<bf16>,
    dh: &Array2<bf16>,
    dw: &Array2<bf16>,
) -> Outcome<()> {
    let (tensors, options) = (Tensors::new(problem, 0..problem.vocab), Options::default());
    let (inputs, dloss) = (tensors.inputs(), arr0(1.0f32).into_dyn());
    let expected = forward(problem, &inputs, &options)?;
    let cotangents = Cotangents::default().dloss(dloss.view());
    let gradients = backward(problem, &inputs, &cotangents, &options)?;
    let same = [
        ("loss", same(Some(&output.loss), Some(&expected.loss))),
        ("lse", same(output.lse.as_ref(), expected.lse.as_ref())),
        ("logprob", same(output.logprob.as_ref(), expected.logprob.as_ref())),
        ("entropy", same(output.entropy.as_ref(), expected.entropy.as_ref())),
        ("argmax", output.argmax == expected.argmax),
        ("dh", same(Some(dh), gradients.dh.as_ref())),
        ("dw", same(Some(dw), gradients.dw.as_ref())),
    ];
    for (name, same) in same {
        println!("{name}: {}", if same { "the bits of one process" } else { "OTHER BITS" });
    }
    match same.iter().all(|(_, same)| *same) {
        true => Ok(()),
        false => Err("shards and one process differ".into()),
    }
}

/// True if two arrays, both there, have the same bits.
fn same<T: Element, D: Dimension>(
    x: Option<&ndarray::Array<T, D>>,
    y: Option<&ndarray::Array<T, D>>,
) -> bool {
    let bits = |x: &T| x.to_f32().to_bits();
    x.zip(y)
        .is_some_and(|(x, y)| x.shape() == y.shape() && x.iter().map(bits).eq(y.iter().map(bits)))
}

fn send_partials<'p>(
    stream: &mut TcpStream,
    partials: impl Iterator<Item = &'p Partial>,
) -> Outcome<()> {
    let bytes: Vec<u8> = partials.flat_map(|partial| partial.to_bytes()).collect();
    Ok(stream.write_all(&bytes)?)
}

fn receive_partials(stream: &mut TcpStream, count: usize) -> Outcome<Vec<Partial>> {
    let mut bytes = vec![0; count * Partial::BYTES];
    stream.read_exact(&mut bytes)?;
    let partials = bytes.as_chunks().0.iter().map(Partial::from_bytes);
    Ok(partials.collect::<Result<_, _>>()?)
}

fn send_floats<D: Dimension>(stream: &mut TcpStream, x: ArrayView<'_, f32, D>) -> Outcome<()> {
    let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
    Ok(stream.write_all(&bytes)?)
}

fn receive_floats(stream: &mut TcpStream, count: usize) -> Outcome<Vec<f32>> {
    let mut bytes = vec![0; count * 4];
    stream.read_exact(&mut bytes)?;
    Ok(bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

fn receive_word(stream: &mut TcpStream) -> Outcome<u32> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}
