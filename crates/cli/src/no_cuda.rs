//! The names of `cuda.rs` in a build without the feature `cuda`: what would use the tier says that it is not there.

use crate::outcome::Failure;
use etalon_conformance::tiers::NO_CUDA;
use std::convert::Infallible;

fn absent<T>() -> Result<T, Failure> {
    Err(Failure(NO_CUDA.to_string()))
}

/// Refuses the value of an option of the cuda tier.
fn refuse(_: &str) -> Result<Infallible, &'static str> {
    Err(NO_CUDA)
}

pub mod archive {
    use crate::outcome::Outcome;
    use std::ffi::OsString;

    #[derive(Debug, clap::Args)]
    pub struct Arguments {
        /// Nothing: this build has no CUDA tier.
        #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
        _words: Vec<OsString>,
    }

    pub fn run(_: &Arguments) -> Outcome {
        super::absent()
    }
}

pub mod levels {
    use crate::outcome::Failure;

    pub fn page() -> Result<String, Failure> {
        super::absent()
    }
}

pub mod plans {
    use super::{Infallible, NO_CUDA, refuse};
    use crate::outcome::Failure;
    use etalon_problem::{Blocking, Dtype, Problem};

    #[derive(Debug, clap::Args)]
    pub struct Arguments {
        #[arg(hide = true, long = "arch", value_parser = refuse)]
        _arch: Option<Infallible>,
        #[arg(hide = true, long = "cuda-level", value_parser = refuse)]
        _cuda_level: Option<Infallible>,
        #[arg(hide = true, long = "precision", value_parser = refuse)]
        _precision: Option<Infallible>,
    }

    pub fn plans(
        _: &Problem,
        dtype: Dtype,
        _: &Arguments,
        _: (Option<Blocking>, usize),
        _: Option<u64>,
    ) -> Result<String, Failure> {
        if dtype == Dtype::F64 {
            return Ok(String::new());
        }
        Ok(format!("\n\nThe cuda tier: {NO_CUDA}."))
    }
}

pub mod gpu {
    use super::{Infallible, refuse};
    use crate::bench::summary::OnDevice;
    use crate::bench::tune::Tried;
    use crate::noise::Times;
    use crate::outcome::Failure;
    use etalon_conformance::tier::Hints;
    use etalon_problem::{Dtype, Error, Mode, Pass, Problem, Views, ViewsMut};

    #[derive(Debug, clap::Args)]
    pub struct Arguments {
        #[arg(hide = true, long = "precision", value_parser = refuse)]
        _precision: Option<Infallible>,
        #[arg(hide = true, long = "assume-finite", num_args = 0, default_missing_value = "", value_parser = refuse)]
        _assume_finite: Option<Infallible>,
        #[arg(hide = true, long = "device", value_parser = refuse)]
        _device: Option<Infallible>,
    }

    /// There is none.
    pub enum Gpu {}

    impl Gpu {
        pub fn new(_: &Arguments, _: Option<&str>, _: Dtype, _: Hints) -> Result<Gpu, Failure> {
            super::absent()
        }

        pub fn describe(&self) -> Result<String, Error> {
            match *self {}
        }

        pub fn peak(&self) -> Result<f64, Error> {
            match *self {}
        }

        pub fn launch(&self) -> Result<f64, Error> {
            match *self {}
        }

        pub fn unit(&self) -> &'static str {
            match *self {}
        }

        pub fn linear_chunk(&self) -> usize {
            match *self {}
        }

        pub fn run(
            &self,
            _: &Problem,
            _: (Pass, Mode),
            _: &Views<'_>,
            _: &mut ViewsMut<'_>,
        ) -> Result<(), Error> {
            match *self {}
        }

        pub fn time(
            &self,
            _: &Problem,
            _: (Pass, Mode),
            _: &Views<'_>,
            _: f64,
        ) -> Result<(Times, OnDevice), Error> {
            match *self {}
        }

        pub fn tune(
            &self,
            _: &Problem,
            _: Pass,
            _: &Views<'_>,
            _: f64,
        ) -> Result<Vec<Tried>, Error> {
            match *self {}
        }

        pub fn refuses(&self, _: &Problem, _: Pass) -> Result<(), Error> {
            match *self {}
        }
    }
}
