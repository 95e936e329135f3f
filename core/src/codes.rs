//! The macro `codes`. It declares an enum each of whose values has a number, for shared memory or the wire, and a text.

/// Declares an enum by the number and the text of each value. The number of a value that was removed is not given to
/// another value.
macro_rules! codes {
    (
        $(#[$about:meta])*
        pub enum $Enum:ident: $code:ident {
            $($(#[$doc:meta])* $name:ident = $number:literal => $text:literal,)+
        }
    ) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr($code)]
        pub enum $Enum { $($(#[$doc])* $name = $number,)+ }

        impl $Enum {
            /// Lists all values in the order of their numbers.
            pub const ALL: &'static [Self] = &[$(Self::$name,)+];

            /// Returns the text of the value, for tables and JSON.
            #[must_use]
            pub const fn text(self) -> &'static str {
                match self { $(Self::$name => $text,)+ }
            }

            /// Returns the value with this number; `None` if this version of the library has no such value.
            #[must_use]
            pub const fn from_code(code: $code) -> Option<Self> {
                match code { $($number => Some(Self::$name),)+ _ => None }
            }
        }

        impl core::fmt::Display for $Enum {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.pad(self.text())
            }
        }
    };
}
pub(crate) use codes;
