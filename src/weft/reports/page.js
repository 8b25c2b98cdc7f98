// What all pages share: put into each page's script where it says so.
/*weft:basics.js*/
/*weft:axis.js*/
/*weft:parts.js*/
