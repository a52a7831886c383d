//! Words of two bf16 each, and instruction sets that multiply registers of them.
//!
//! A word lies where an f32 would, the even element of a pair in its low half.

use super::Isa;

/// An instruction that multiplies pairs, proven present, beside the registers of an instruction set.
pub trait Pairs: Copy {
    /// The instruction set of its registers.
    type Isa: Isa;

    /// The token of the registers.
    fn isa(self) -> Self::Isa;

    /// sum + a · b, of both elements of every word.
    fn add(self, a: Words<Self>, b: Words<Self>, sum: Words<Self>) -> Words<Self>;
}

/// A register of f32, or of words.
pub type Words<P> = <<P as Pairs>::Isa as Isa>::F32;

/// A word of the bits of two numbers of bf16.
#[inline(always)]
pub fn word(even: u32, odd: u32) -> f32 {
    f32::from_bits(even | odd << 16)
}
