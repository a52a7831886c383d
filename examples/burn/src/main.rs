//! Etalon's attention and cross-entropy as operations of burn on its CPU backend `Flex`: their results and gradients
//! beside those of burn's own operations, and a model of one layer that learns to repeat a text.
//!
//! As burn's own operations do, these panic where tensors do not fit.

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::{
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::flex::FlexTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension, tensor::FloatTensor};
use burn::tensor::{Device, Distribution, Int, Tensor, TensorData, activation};
use etalon_problem::{self as problem, Extents, LinearCrossEntropy, Mask};
use etalon_simd::{Options, attention, linear_cross_entropy as loss};
use ndarray::{Array, ArrayView, ArrayView1, Dimension, ShapeBuilder};

#[backend_extension(Flex, Autodiff)]
pub trait Fused: Backend {
    /// Causal attention: o [B, Hq, N, E] of q [B, Hq, N, D], k [B, Hk, M, D] and v [B, Hk, M, E].
    fn attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// The mean cross-entropy of logits h wᵀ, which are never stored as a whole, of h [T, D] and w [V, D]: [1].
    fn cross_entropy(
        h: FloatTensor<Self>,
        w: FloatTensor<Self>,
        targets: Vec<i64>,
    ) -> FloatTensor<Self>;
}

/// The elements of a tensor, of any strides that are not negative.
fn view<D: Dimension>(x: &FlexTensor) -> ArrayView<'_, f32, D> {
    let layout = x.layout();
    let axes = layout.strides().len();
    let (mut shape, mut strides) = (D::zeros(axes), D::zeros(axes));
    for axis in 0..axes {
        shape[axis] = layout.shape()[axis];
        strides[axis] =
            usize::try_from(layout.strides()[axis]).expect("a stride that is not negative");
    }
    let elements = &x.storage::<f32>()[layout.start_offset()..];
    ArrayView::from_shape(shape.strides(strides), elements).expect("strides within the tensor")
}

/// A tensor of a result, whose rows lie one after the other.
fn tensor<D: Dimension>(array: Array<f32, D>) -> FlexTensor {
    let shape = array.shape().to_vec();
    FlexTensor::from_data(TensorData::new(array.into_raw_vec_and_offset().0, shape))
}

fn of_attention(inputs: &attention::Inputs<'_, f32>) -> problem::Attention {
    let (batch, query_heads, queries, dim) = inputs.q.dim();
    let (_, key_heads, keys, value_dim) = inputs.v.dim();
    let extents = Extents { batch, query_heads, key_heads, queries, keys, dim };
    problem::Attention::new(extents).value_dim(value_dim).mask(Mask::causal())
}

fn attended(q: &FlexTensor, k: &FlexTensor, v: &FlexTensor) -> attention::Output<f32> {
    let inputs = attention::Inputs::new(view(q), view(k), view(v));
    attention::forward(&of_attention(&inputs), &inputs, &Options::default())
        .expect("tensors that fit")
}

fn of_loss(inputs: &loss::Inputs<'_, f32>) -> LinearCrossEntropy {
    LinearCrossEntropy::new(inputs.h.nrows(), inputs.h.ncols(), inputs.w.nrows())
}

impl Fused for Flex {
    fn attention(q: FlexTensor, k: FlexTensor, v: FlexTensor) -> FlexTensor {
        tensor(attended(&q, &k, &v).o)
    }

    fn cross_entropy(h: FlexTensor, w: FlexTensor, targets: Vec<i64>) -> FlexTensor {
        let inputs = loss::Inputs::new(view(&h), view(&w), ArrayView1::from(&targets));
        let made = loss::forward(&of_loss(&inputs), &inputs, &Options::default())
            .expect("tensors that fit");
        tensor(made.loss.into_shape_with_order(1).expect("a loss of all tokens"))
    }
}

#[derive(Debug)]
struct AttentionBackward;

impl Backward<Flex, 3> for AttentionBackward {
    /// q, k, v, o and lse.
    type State = [FlexTensor; 5];

    fn backward(self, ops: Ops<Self::State, 3>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let ([q, k, v, o, lse], dout) = (&ops.state, gradients.consume::<Flex>(&ops.node));
        let inputs = attention::Inputs::new(view(q), view(k), view(v));
        let out = attention::OutputRef { o: view(o), lse: view(lse) };
        let given = attention::Cotangents::new(view(&dout));
        let made =
            attention::backward(&of_attention(&inputs), &inputs, out, &given, &Options::default());
        let made = made.expect("tensors that fit");
        for (parent, gradient) in ops.parents.iter().zip([made.dq, made.dk, made.dv]) {
            if let Some(parent) = parent {
                gradients.register::<Flex>(parent.id, tensor(gradient));
            }
        }
    }
}

#[derive(Debug)]
struct LossBackward;

impl Backward<Flex, 2> for LossBackward {
    type State = (FlexTensor, FlexTensor, Vec<i64>);

    fn backward(self, ops: Ops<Self::State, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let ((h, w, targets), dloss) = (&ops.state, gradients.consume::<Flex>(&ops.node));
        let inputs = loss::Inputs::new(view(h), view(w), ArrayView1::from(targets));
        let dloss = view::<ndarray::Ix1>(&dloss)
            .into_shape_with_order(ndarray::IxDyn(&[]))
            .expect("a cotangent of one number");
        let given = loss::Cotangents { dloss: Some(dloss), ..Default::default() };
        let made = loss::backward(&of_loss(&inputs), &inputs, &given, &Options::default());
        let made = made.expect("tensors that fit");
        for (parent, gradient) in ops.parents.iter().zip([made.dh, made.dw]) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                gradients.register::<Flex>(parent.id, tensor(gradient));
            }
        }
    }
}

impl<C: CheckpointStrategy> Fused for Autodiff<Flex, C> {
    fn attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let nodes = [q.node(), k.node(), v.node()];
        let [q, k, v] = [q, k, v].map(|x| x.into_primitive());
        match AttentionBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => {
                let out = attended(&q, &k, &v);
                let (o, lse) = (tensor(out.o), tensor(out.lse));
                prepared.finish([q, k, v, o.clone(), lse], o)
            }
            OpsKind::UnTracked(prepared) => prepared.finish(Flex::attention(q, k, v)),
        }
    }

    fn cross_entropy(
        h: FloatTensor<Self>,
        w: FloatTensor<Self>,
        targets: Vec<i64>,
    ) -> FloatTensor<Self> {
        let nodes = [h.node(), w.node()];
        let [h, w] = [h, w].map(|x| x.into_primitive());
        let made = Flex::cross_entropy(h.clone(), w.clone(), targets.clone());
        match LossBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish((h, w, targets), made),
            OpsKind::UnTracked(prepared) => prepared.finish(made),
        }
    }
}

fn fused_attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
    Tensor::from_dispatch(Dispatch::attention(
        q.into_dispatch(),
        k.into_dispatch(),
        v.into_dispatch(),
    ))
}

fn fused_loss(h: Tensor<2>, w: Tensor<2>, targets: &[i64]) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::cross_entropy(
        h.into_dispatch(),
        w.into_dispatch(),
        targets.to_vec(),
    ))
}

/// Attention of burn's own operations.
fn own_attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
    let [_, _, n, d] = q.dims();
    let later = Tensor::<2>::ones([n, n], &q.device()).triu(1).reshape([1, 1, n, n]) * 1e9;
    let scores = q.matmul(k.transpose()) / (d as f64).sqrt() - later;
    activation::softmax(scores, 3).matmul(v)
}

/// Cross-entropy of burn's own operations.
fn own_loss(h: Tensor<2>, w: Tensor<2>, targets: &[i64]) -> Tensor<1> {
    let right = Tensor::<2, Int>::from_data(
        TensorData::new(targets.to_vec(), [targets.len(), 1]),
        &h.device(),
    );
    activation::log_softmax(h.matmul(w.transpose()), 1).gather(1, right).mean().neg()
}

fn number(x: Tensor<1>) -> f32 {
    x.into_scalar::<f32>()
}

/// The largest difference of the loss and of all gradients from those of burn's own operations.
fn compare(device: &Device) -> f32 {
    let (n, heads, d, vocab) = (96, 4, 32, 500);
    let draw = || {
        Tensor::<4>::random([1, heads, n, d], Distribution::Normal(0.0, 1.0), device).require_grad()
    };
    let (q, k, v) = (draw(), draw(), draw());
    let w = Tensor::<2>::random([vocab, heads * d], Distribution::Normal(0.0, 1.0), device)
        .require_grad();
    let targets: Vec<i64> = (0..n as i64).map(|at| at * 7 % vocab as i64).collect();
    let flat = |o: Tensor<4>| o.swap_dims(1, 2).reshape([n, heads * d]);
    let fused =
        fused_loss(flat(fused_attention(q.clone(), k.clone(), v.clone())), w.clone(), &targets);
    let own = own_loss(flat(own_attention(q.clone(), k.clone(), v.clone())), w.clone(), &targets);
    let mut largest = number((fused.clone() - own.clone()).abs());
    let (fused, own) = (fused.backward(), own.backward());
    for x in [&q, &k, &v] {
        let (mine, other) = (x.grad(&fused), x.grad(&own));
        largest = largest
            .max(number((mine.expect("a gradient") - other.expect("a gradient")).abs().max()));
    }
    let (mine, other) = (w.grad(&fused), w.grad(&own));
    largest.max(number((mine.expect("a gradient") - other.expect("a gradient")).abs().max()))
}

/// Trains a layer of attention to say the next letter of a text; the losses of the first and of the last step.
fn train(steps: usize, device: &Device) -> (f32, f32) {
    let text = b"how much wood would a woodchuck chuck if a woodchuck could chuck wood? ".repeat(3);
    let (n, d, heads, vocab) = (text.len() - 1, 32, 4, 128);
    let shapes = [[vocab, d], [n, d], [d, 3 * d]];
    let mut weights = shapes
        .map(|x| Tensor::<2>::random(x, Distribution::Normal(0.0, 0.2), device).require_grad());
    let ids: Vec<i64> = text.iter().map(|&letter| letter.into()).collect();
    let input = Tensor::<1, Int>::from_data(TensorData::new(ids[..n].to_vec(), [n]), device);
    let mut losses = Vec::new();
    for _ in 0..steps {
        let [letters, places, mix] = &weights;
        let x = letters.clone().select(0, input.clone()) + places.clone();
        // q, k and v are slices of one tensor: etalon reads them where they lie.
        let packed =
            x.clone().matmul(mix.clone()).reshape([1, n, 3 * heads, d / heads]).swap_dims(1, 2);
        let [q, k, v] = [0, 1, 2].map(|at| packed.clone().narrow(1, at * heads, heads));
        let h = x + fused_attention(q, k, v).swap_dims(1, 2).reshape([n, d]);
        let loss = fused_loss(h, letters.clone(), &ids[1..]);
        losses.push(number(loss.clone()));
        let gradients = loss.backward();
        weights = weights.map(|x| {
            let gradient = x.grad(&gradients).expect("a gradient");
            Tensor::from_inner(x.inner() - gradient * 2.0).require_grad()
        });
    }
    (losses[0], losses[steps - 1])
}

fn main() {
    let device = Device::default().autodiff();
    let largest = compare(&device);
    println!("largest difference from burn's own operations: {largest:.1e}");
    let (first, last) = train(100, &device);
    println!("loss of the first step {first:.3}, of the last {last:.3}");
    assert!(largest < 1e-4 && last < first / 2.0, "the gradients are wrong");
}
