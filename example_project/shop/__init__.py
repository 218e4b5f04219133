"""The app of the shop: products, sales, and a flash sale."""
