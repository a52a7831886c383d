//! Unit tests of `src/step.rs`.

use crate::args::{ConstPtr, kernel_args};
use crate::parts::Parts;
use crate::step::{Bases, Region, Steps};
use crate::target::Target;
use crate::variant::Variant;
use etalon_problem::{Dtype, Pass};

kernel_args! {
    struct One as "One" {
        at: ConstPtr<f32>,
    }
}

#[test]
fn a_pass_of_too_many_steps_names_the_option_that_helps() {
    let target = Target::default();
    let none = &Parts { target, pass: Pass::Forward, storage: Dtype::F32, list: Vec::new(), aligned: true };
    let (steps, variant) = (Steps::new(&none).unwrap(), Variant::moves(4));
    let launch = || steps.launch((&variant, "move"), (1, 256), &One { at: 1.into() });
    // As many as `Options::memory_budget` says.
    (0..100_000).for_each(|_| launch().unwrap());
    let error = launch().unwrap_err().to_string();
    assert!(error.contains("memory_budget"), "{error}");
}

#[test]
fn a_symbol_resolves_in_its_region_and_no_other_number_panics() {
    let bases = Bases { scratch: 256, tables: 512, operands: &[1024] };
    assert_eq!(bases.resolve(Region::Scratch.symbol() + 8), 256 + 8);
    assert_eq!(bases.resolve(Region::Tables.symbol() + 8), 512 + 8);
    assert_eq!(bases.resolve(Region::Operand(0).symbol() + 8), 1024 + 8);
    // An address without a region, and an operand that the caller lacks.
    assert_eq!(bases.resolve(8), 8);
    assert_eq!(bases.resolve(Region::Operand(1).symbol()), 0);
}
