//! Unit tests of `src/linear_cross_entropy/shard.rs`.

use super::*;
use crate::{DeviceTensors, Options, Workspace};
use etalon_problem::{Error, Views};
use ndarray::Array2;

#[test]
fn more_classes_than_31_bits_count_are_refused_before_a_device_is_asked() {
    let problem = LinearCrossEntropy::new(1, 1, 1 << 31);
    let shard = Shard::new(&problem, 0..1 << 31).unwrap();
    let (workspace, options, none) = (Workspace::new(), Options::default(), DeviceTensors::new());
    let refused = |error: Option<Error>| match error {
        Some(Error::Unsupported { what, .. }) => assert_eq!(what, "a vocabulary of 2147483648"),
        other => panic!("{other:?}"),
    };
    refused(prepare_forward(&workspace, &shard, &none, &none, &options).err());
    refused(prepare_backward(&workspace, &shard, &none, &none, Dh::Sum, &options).err());
    let all = std::slice::from_ref(&(0..1 << 31));
    refused(prepare_combine(&workspace, &problem, all, &none, &none, &options).err());
    let sum = (all, Dh::Sum);
    refused(prepare_combine_dh(&workspace, &problem, sum, &none, &none, &options).err());
    refused(forward_shard(&workspace, &shard, &Views::new(), &options).err());
    let none = Array2::from_elem((1, 1), Partial::identity());
    let shards = [(shard.classes(), none.view())];
    refused(combine(&workspace, &problem, &shards, &options).err());
}
