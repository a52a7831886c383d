//! Etalon's attention and cross-entropy as operations of candle: their results and gradients beside those of candle's
//! own operations, and a model of one layer that learns to repeat a text.

use candle_core::{
    CpuStorage, CustomOp2, CustomOp3, D, DType, Device, Error, Layout, Result, Shape, Storage,
    Tensor, Var, bail,
};
use etalon_problem::{self as problem, Extents, LinearCrossEntropy, Mask};
use etalon_simd::{Options, attention, linear_cross_entropy as loss};
use ndarray::{Array, Array3, ArrayView, ArrayView1, Dimension, ShapeBuilder};
use std::sync::OnceLock;

/// Causal attention: o [B, Hq, N, E] of q [B, Hq, N, D], k [B, Hk, M, D] and v [B, Hk, M, E]. One is made for each
/// call, and keeps lse for the backward pass.
#[derive(Default)]
struct Attention {
    lse: OnceLock<Array3<f32>>,
}

/// The mean cross-entropy of logits h wᵀ, which are never stored as a whole, of h [T, D] and w [V, D].
struct Loss {
    targets: Vec<i64>,
}

/// The elements of a tensor, of any strides.
fn view<'a, D: Dimension>(
    memory: &'a CpuStorage,
    layout: &Layout,
) -> Result<ArrayView<'a, f32, D>> {
    let axes = layout.dims().len();
    if D::NDIM.is_some_and(|expected| expected != axes) {
        bail!("etalon needs a tensor of {} axes, found {:?}", D::NDIM.unwrap_or(0), layout.shape());
    }
    let (mut shape, mut strides) = (D::zeros(axes), D::zeros(axes));
    shape.slice_mut().copy_from_slice(layout.dims());
    strides.slice_mut().copy_from_slice(layout.stride());
    let elements = &memory.as_slice::<f32>()?[layout.start_offset()..];
    ArrayView::from_shape(shape.strides(strides), elements).map_err(Error::wrap)
}

/// Binds names to the elements of tensors of the CPU.
macro_rules! lend {
    ($($name:ident),*) => {$(
        let (storage, layout) = $name.storage_and_layout();
        let Storage::Cpu(memory) = &*storage else { bail!("etalon has tensors of the CPU here") };
        let $name = view(memory, layout)?;
    )*};
}

/// A tensor of a result, whose rows lie one after the other.
fn tensor<D: Dimension>(array: Array<f32, D>) -> Result<Tensor> {
    let shape = array.shape().to_vec();
    Tensor::from_vec(array.into_raw_vec_and_offset().0, shape, &Device::Cpu)
}

impl Attention {
    fn problem(inputs: &attention::Inputs<'_, f32>) -> problem::Attention {
        let (batch, query_heads, queries, dim) = inputs.q.dim();
        let (_, key_heads, keys, value_dim) = inputs.v.dim();
        let extents = Extents { batch, query_heads, key_heads, queries, keys, dim };
        problem::Attention::new(extents).value_dim(value_dim).mask(Mask::causal())
    }
}

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        "etalon-attention"
    }

    #[rustfmt::skip]
    fn cpu_fwd(
        &self, q: &CpuStorage, of_q: &Layout, k: &CpuStorage, of_k: &Layout, v: &CpuStorage, of_v: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let inputs = attention::Inputs::new(view(q, of_q)?, view(k, of_k)?, view(v, of_v)?);
        let made = attention::forward(&Self::problem(&inputs), &inputs, &Options::default());
        let attention::Output { o, lse } = made.map_err(Error::wrap)?;
        let shape = Shape::from(o.shape());
        self.lse.set(lse).map_err(|_| Error::msg("an Attention is made for a single call"))?;
        Ok((CpuStorage::F32(o.into_raw_vec_and_offset().0), shape))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        o: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let lse = self.lse.get().ok_or_else(|| Error::msg("a backward pass before the forward"))?;
        lend!(q, k, v, o, dout);
        let inputs = attention::Inputs::new(q, k, v);
        let (out, given) =
            (attention::OutputRef { o, lse: lse.view() }, attention::Cotangents::new(dout));
        let (problem, options) = (Self::problem(&inputs), Options::default());
        let made =
            attention::backward(&problem, &inputs, out, &given, &options).map_err(Error::wrap)?;
        Ok((Some(tensor(made.dq)?), Some(tensor(made.dk)?), Some(tensor(made.dv)?)))
    }
}

impl CustomOp2 for Loss {
    fn name(&self) -> &'static str {
        "etalon-linear-cross-entropy"
    }

    #[rustfmt::skip]
    fn cpu_fwd(
        &self, h: &CpuStorage, of_h: &Layout, w: &CpuStorage, of_w: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let inputs = loss::Inputs::new(view(h, of_h)?, view(w, of_w)?, ArrayView1::from(&self.targets));
        let problem = LinearCrossEntropy::new(inputs.h.nrows(), inputs.h.ncols(), inputs.w.nrows());
        let made = loss::forward(&problem, &inputs, &Options::default()).map_err(Error::wrap)?;
        Ok((CpuStorage::F32(made.loss.into_raw_vec_and_offset().0), Shape::from(())))
    }

    fn bwd(
        &self,
        h: &Tensor,
        w: &Tensor,
        _: &Tensor,
        dloss: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        lend!(h, w, dloss);
        let inputs = loss::Inputs::new(h, w, ArrayView1::from(&self.targets));
        let problem = LinearCrossEntropy::new(inputs.h.nrows(), inputs.h.ncols(), inputs.w.nrows());
        let given = loss::Cotangents { dloss: Some(dloss), ..Default::default() };
        let made =
            loss::backward(&problem, &inputs, &given, &Options::default()).map_err(Error::wrap)?;
        Ok((made.dh.map(tensor).transpose()?, made.dw.map(tensor).transpose()?))
    }
}

/// Attention of candle's own operations.
fn own_attention(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let (n, d) = (q.dim(2)?, q.dim(3)?);
    let later =
        Tensor::triu2(n, DType::F32, &Device::Cpu)? - Tensor::eye(n, DType::F32, &Device::Cpu)?;
    let scores = (q.matmul(&k.t()?)? / (d as f64).sqrt())?.broadcast_sub(&(later? * 1e9)?)?;
    let powers = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?.exp()?;
    powers.broadcast_div(&powers.sum_keepdim(D::Minus1)?)?.matmul(v)
}

/// Cross-entropy of candle's own operations.
fn own_loss(h: &Tensor, w: &Tensor, targets: &[i64]) -> Result<Tensor> {
    let logits = h.matmul(&w.t()?)?;
    let right = Tensor::from_slice(targets, (targets.len(), 1), &Device::Cpu)?;
    (logits.log_sum_exp(D::Minus1)? - logits.gather(&right, D::Minus1)?.squeeze(D::Minus1)?)?
        .mean_all()
}

/// Numbers between −scale and scale, the same in every run: candle's own for the CPU have no seed.
fn draw(shape: &[usize], scale: f32) -> Result<Var> {
    let count: usize = shape.iter().product();
    let mix = |at: u64| (at ^ (at >> 29)).wrapping_mul(0xbf58476d1ce4e5b9);
    let number = |at| mix(mix(at + u64::from(scale.to_bits()))) >> 40;
    let numbers = (1..=count as u64)
        .map(|at| (number(at * 0x9e3779b9) as f32 / (1 << 23) as f32 - 1.0) * scale);
    Var::from_vec(numbers.collect(), shape, &Device::Cpu)
}

/// The largest difference of the loss and of all gradients from those of candle's own operations.
fn compare() -> Result<f32> {
    let (n, heads, d, vocab) = (96, 4, 32, 500);
    let (q, k, v) = (
        draw(&[1, heads, n, d], 1.7)?,
        draw(&[1, heads, n, d], -0.9)?,
        draw(&[1, heads, n, d], 1.3)?,
    );
    let w = draw(&[vocab, heads * d], 1.7)?;
    let targets: Vec<i64> = (0..n as i64).map(|at| at * 7 % vocab as i64).collect();
    let flat = |o: Tensor| o.transpose(1, 2)?.reshape((n, heads * d));
    let fused = q.apply_op3(&k, &v, Attention::default())?;
    let fused = flat(fused)?.apply_op2(&w, Loss { targets: targets.clone() })?;
    let own = own_loss(&flat(own_attention(&q, &k, &v)?)?, &w, &targets)?;
    let mut largest = (fused.to_scalar::<f32>()? - own.to_scalar::<f32>()?).abs();
    let (fused, own) = (fused.backward()?, own.backward()?);
    for x in [&q, &k, &v, &w] {
        let (Some(mine), Some(other)) = (fused.get(x), own.get(x)) else {
            bail!("a gradient is missing")
        };
        largest = largest.max((mine - other)?.abs()?.max_all()?.to_scalar()?);
    }
    Ok(largest)
}

/// Trains a layer of attention to say the next letter of a text; the losses of the first and of the last step.
fn train(steps: usize) -> Result<(f32, f32)> {
    let text = b"how much wood would a woodchuck chuck if a woodchuck could chuck wood? ".repeat(3);
    let (n, d, heads, vocab) = (text.len() - 1, 32, 4, 128);
    let (letters, places, mix) =
        (draw(&[vocab, d], 0.3)?, draw(&[n, d], 0.2)?, draw(&[d, 3 * d], 0.4)?);
    let ids: Vec<i64> = text.iter().map(|&letter| letter.into()).collect();
    let input = Tensor::from_slice(&ids[..n], n, &Device::Cpu)?;
    let mut losses = Vec::new();
    for _ in 0..steps {
        let x = (letters.index_select(&input, 0)? + places.as_tensor())?;
        // q, k and v are slices of one tensor: etalon reads them where they lie.
        let packed = x.matmul(&mix)?.reshape((1, n, 3 * heads, d / heads))?.transpose(1, 2)?;
        let [q, k, v] = [0, 1, 2].map(|at| packed.narrow(1, at * heads, heads));
        let o = q?.apply_op3(&k?, &v?, Attention::default())?;
        let h = (x + o.transpose(1, 2)?.reshape((n, d))?)?;
        let loss = h.apply_op2(&letters, Loss { targets: ids[1..].to_vec() })?;
        losses.push(loss.to_scalar()?);
        let gradients = loss.backward()?;
        for x in [&letters, &places, &mix] {
            let Some(gradient) = gradients.get(x) else { bail!("a gradient is missing") };
            x.set(&(x.as_tensor() - (gradient * 0.5)?)?)?;
        }
    }
    Ok((losses[0], losses[steps - 1]))
}

fn main() -> Result<()> {
    let largest = compare()?;
    println!("largest difference from candle's own operations: {largest:.1e}");
    let (first, last) = train(60)?;
    println!("loss of the first step {first:.3}, of the last {last:.3}");
    if largest.is_nan() || largest > 1e-4 || last.is_nan() || last > first / 2.0 {
        bail!("the gradients are wrong");
    }
    Ok(())
}
