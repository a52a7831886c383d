//! A program that computes nothing: what a call of it takes is what the transport takes.

use super::{HELLO, OUTPUTS, SHARED};
use crate::tensor::Tensor;
use crate::vectors::data_of;
use crate::wire::{Arrived, File, Frame, Most, Placed, Wanted};
use std::io::{self, Read, Write};

/// Answers every request until its stream ends: with zeros, or by shared files with what lies there. It looks at no
/// element.
pub fn null(mut requests: impl Read, mut answers: impl Write) -> io::Result<()> {
    // The same is mostly asked for again.
    let mut last: Option<(Vec<Wanted>, Vec<Placed>, Vec<u8>)> = None;
    while let Some(arrived) = Arrived::receive(&mut requests, Most::ANY)? {
        let Frame { kind, id, wanted, placed, .. } = arrived.without_elements()?;
        let mut bytes = match last.take() {
            Some((asked, places, bytes)) if (&asked, &places) == (&wanted, &placed) => bytes,
            _ => answer(kind, &wanted, &placed)?,
        };
        bytes[Frame::ID].copy_from_slice(&id.to_le_bytes());
        answers.write_all(&bytes)?;
        answers.flush()?;
        last = (kind != HELLO).then_some((wanted, placed, bytes));
    }
    Ok(())
}

fn answer(kind: u32, wanted: &[Wanted], placed: &[Placed]) -> io::Result<Vec<u8>> {
    let frame = match kind {
        HELLO => Frame { kind, text: format!("null\n{SHARED}").into(), ..Frame::default() },
        _ => {
            let zeros = |x: &Wanted| {
                let data = data_of(x.dtype, &vec![0; x.bytes()])?;
                Some((x.name.clone(), Tensor { shape: x.shape.clone(), data }))
            };
            let tensors = wanted.iter().filter_map(zeros).collect();
            let own = placed.iter().filter(|x| x.file == File::Outputs).cloned().collect();
            Frame { kind: OUTPUTS, tensors, placed: own, ..Frame::default() }
        }
    };
    frame.to_bytes().map_err(io::Error::other)
}
