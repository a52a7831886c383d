//! The options of a problem: as a chain of calls, and as a table of what else a kernel may take each for.

/// Options of a problem, each with its arguments, its place in the problem, what it puts there, and after
/// `or` what a kernel may read in its place ([`crate::Alternative`]). An option of a tensor is `or tensor`:
/// what a kernel may read in its place are other elements. What is no question of arithmetic is `or none`.
macro_rules! options {
    ($Problem:ident {
        $(
            $(#[$doc:meta])*
            $name:ident($($argument:ident: $type:ty),*) => $($place:ident).+ = $value:expr,
            or $kind:ident $(($x:ident => $others:expr))?;
        )*
    }) => {
        impl $Problem {
            $(
                $(#[$doc])*
                pub fn $name(mut self, $($argument: $type),*) -> Self {
                    self.$($place).+ = $value;
                    self
                }
            )*

            /// Adds the options to a table.
            #[allow(dead_code, reason = "a problem may have several tables")]
            pub(crate) fn options_of_table(
                &self,
                table: &mut Vec<crate::Setting>,
                into: &impl Fn(Self) -> crate::Problem,
            ) {
                $(table.push(crate::options::setting!(
                    self, into, $name, $kind, [$($place).+] $(($x => $others))?
                ));)*
            }
        }
    };
}
pub(crate) use options;

/// A row of the table of options.
macro_rules! setting {
    ($self:ident, $into:ident, $name:ident, others, [$($place:ident).+] ($x:ident => $others:expr)) => {{
        let $x = $self;
        let others: Vec<crate::alternatives::Other<_>> = $others;
        let others = others.into_iter().filter_map(|other| {
            let mut problem = $self.clone();
            problem.$($place).+ = other.value;
            let problem = $into(problem);
            let sound = problem != $into($self.clone()) && problem.check().is_ok();
            let option = stringify!($name);
            let (change, text) = (other.change, other.text);
            sound.then_some(crate::Alternative { option, change, text, problem })
        });
        let others = others.collect();
        crate::Setting { name: stringify!($name), kind: crate::SettingKind::Value, others }
    }};
    ($self:ident, $into:ident, $name:ident, tensor, [$($place:ident).+]) => {
        crate::Setting {
            name: stringify!($name),
            kind: crate::SettingKind::Tensor,
            others: Vec::new(),
        }
    };
    ($self:ident, $into:ident, $name:ident, none, [$($place:ident).+]) => {
        crate::Setting {
            name: stringify!($name),
            kind: crate::SettingKind::Form,
            others: Vec::new(),
        }
    };
}
pub(crate) use setting;
